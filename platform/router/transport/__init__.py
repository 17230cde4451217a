"""HTTP as bytes: the listener, one exchange, its client and headers, uploads, and how a gateway drains.

Not what requests mean (`api`, `completions`). May import routing and config.
"""
