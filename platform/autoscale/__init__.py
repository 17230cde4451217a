"""The autoscaler: how many replicas each pool should have, and the way there."""
