"""The pure decisions: what a request is, which replica and which tier get it, and its chain of block keys.

No I/O, no clock: `now` and randomness come in as parameters. May import config, and nothing else of the router.
"""
