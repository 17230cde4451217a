"""The gateway: HTTP API, queue, routing policy, and the streams to the replicas."""
