"""vLLM as a replica's engine, in a process of its own, behind the surface of our own engine.

`bridge` runs in vLLM's interpreter and imports nothing of penstock. The rest may import compute, engine and config.
"""
