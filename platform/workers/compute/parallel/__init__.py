"""Tensor parallelism: one model in several processes, each with its share of heads, channels and vocabulary (Shoeybi et
al. 2019, Megatron-LM, arXiv 1909.08053).

Rank 0 is the replica's own process; the others compute what it tells them. Not several replicas, nor several machines.
"""
