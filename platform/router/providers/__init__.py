"""External servers with OpenAI's API as part of the cloud tier, and the circuit breaker before each.

Not our own pools (`replicas`, which is never imported here). May import transport, routing and config.
"""
