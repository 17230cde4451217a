"""Matrices of few bits on a GPU: how their bytes lie, kernels that multiply by them, and the choice among kernels by
rows, shape and GPU. Knows no attention and no choice of tokens.
"""
