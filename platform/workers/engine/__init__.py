"""The engine without tensors: scheduler, KV blocks, sequences, draft lengths, the probe of step costs, the timed
runner.

It sees what computes through the `Runner` protocol only: no torch, and nothing of `compute`. May import config.
"""
