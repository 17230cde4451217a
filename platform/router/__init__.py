"""The gateway: HTTP API, queue, routing policy, and the streams to the replicas.

`app` builds it, `config` holds its settings, and the rooms do the work. Not the replicas themselves (`workers`) and not
their number (`autoscale`). May import adapters, tenancy, prefix, perf, text, wire and base.
"""
