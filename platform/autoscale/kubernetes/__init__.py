"""The autoscaler as a Kubernetes Deployment: leader by a Lease, worker counts in the active RayCluster behind a
RayService. `lease` and `plan` are the decisions, and pure; `client` and `mirror` hold what speaks to the API server, by
the official client. What Ray Serve runs and how much of it is decided in `autoscale`; this package may import that, but
only `run`, the composition root, does.
"""
