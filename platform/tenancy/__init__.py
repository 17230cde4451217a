"""Tenants: their settings, API keys, limits and usage, all of it in Redis.

Not the HTTP side: who turns a request away, and with which headers, is `router.completions.admission`. May import
prefix, perf, text, wire and base; never adapters.
"""
