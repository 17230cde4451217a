"""The replica's end of the token stream: sessions with routers, their submissions, the frames to them, and the adapters
in the replica's slots.

Not the engine's loop (`engine`) and not tensors (`compute`). May import compute, engine and config; never quantize or
vllm.
"""
