"""A black-box load tester for OpenAI-compatible servers: open-loop load, real traces, a ledger, a report.

Not a benchmark of the engine from inside (`bench` at the root). Imports nothing of penstock.
"""
