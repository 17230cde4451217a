"""`penstock quantize`, offline: calibration, the search for scales, checkpoints as they grow, and perplexity before and
after.

Not what a replica loads (`compute.quant`, `compute.readers`). May import compute, engine and config; nobody here
imports it.
"""
