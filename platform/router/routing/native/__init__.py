"""The choice among many replicas in C++, behind a plain C ABI, and how it is built and called: without torch, for
gateways have none.

Replaceable by the choice in arrays (`routing.search`). May import base.
"""
