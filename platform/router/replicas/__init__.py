"""The replicas as this gateway knows them: who they are, a link and a client to each, where adapters lie, and the
report on them to the autoscaler.

Not the replica's own end of the stream (`penstock.workers.serving`). May import transport, routing and config; never
providers.
"""
