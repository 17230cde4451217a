"""The mirror's map in C++, behind a plain C ABI, and how it is built and called: without torch, for gateways have none.

Replaceable by the mirror in Python alone (`prefix.plain_index`). May import wire and base.
"""
