"""Choosing tokens on a GPU: what it is told of each row, and the kernels that change rows, cut them and choose from
them. May import `staging`; knows no products and no attention.
"""
