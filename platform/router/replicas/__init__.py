"""The replicas as this gateway sees them: who they are, a link and a client to each, where adapters lie, what the
autoscaler is told.

Not the replica's own end of the stream (`penstock.workers.serving`). May import transport, routing and config; never
providers.
"""
