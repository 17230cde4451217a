"""The replica's end of the token stream: sessions of routers, what they submit, what they are told, and which adapters
are resident.

Not the engine's loop (`engine`) and not tensors (`compute`). May import compute, engine and config; never quantize or
vllm.
"""
