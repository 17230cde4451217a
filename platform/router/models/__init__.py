"""The API's model names: what serves each, and the adapters of tenants as models.

Not weights, and not the engine's models (`penstock.workers`). May import replicas, providers, transport, routing and
config.
"""
