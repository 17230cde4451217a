"""The autoscaler as a Kubernetes Deployment: leader by a Lease, worker counts in the active RayCluster behind a
RayService. `lease` and `plan` are the decisions, and pure; `client` and `mirror` hold what speaks to the API server, by
the official client. Not how many replicas a pool should have: `autoscale` decides that. Only `run`, the composition
root, imports it.
"""
