"""vLLM as a replica's engine, in a child process, with the same methods as our own engine.

Not our own scheduling or computing (`engine`, `compute`). `bridge` runs in vLLM's interpreter and imports nothing of
penstock; the rest may import compute, engine and config, and what reads the files of adapters (`penstock.adapters`).
"""
