"""A black-box load tester for OpenAI-compatible servers: open-loop load, real traces, a ledger, a report. Imports
nothing of penstock."""
