"""The gateway's paths and what stands behind each: the two generation endpoints, adapters, pages, the OpenAPI
description.

Not the work on a generation request (`completions`), and not sockets (`transport`). May import every other room of the
router.
"""
