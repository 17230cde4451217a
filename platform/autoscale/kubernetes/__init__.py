"""The autoscaler as a Kubernetes Deployment: leader by Lease, worker counts in the active RayCluster behind a
RayService."""
