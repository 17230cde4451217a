"""Block hashing and the prefix index: which replica holds which KV blocks. The index is pure; `store` alone uses Redis.

Not the blocks themselves (`workers.engine`) and not the choice of a replica (`router.routing`). May import wire and
base; never perf or text.
"""
