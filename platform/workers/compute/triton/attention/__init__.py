"""Paged attention on a GPU: a step's plan, block tables that stay on the device, and the kernels that write and read
the cache of keys and values. May import `staging`; knows no products and no choice of tokens.
"""
