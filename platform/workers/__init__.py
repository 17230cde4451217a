"""A pool's replicas: the engine with paged KV and a one-phase scheduler, models and kernels, vLLM in its place, offline
quantization, and the replica that serves an engine on the token stream.

Not the routers, which choose among replicas. May import adapters, perf, prefix, text, wire and base; siblings
(`router`, `autoscale`) never.
"""
