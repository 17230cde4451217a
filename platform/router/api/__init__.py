"""The gateway's paths and the handler of each: the two completion endpoints, adapters, pages, the OpenAPI description.

Not the work on a generation request (`completions`), and not sockets (`transport`). May import every other room of the
router.
"""
