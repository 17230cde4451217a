"""Rivals' routing policies, for a contest with ours in the simulator under the same loads.

`rivals` has the policies by their published formulas, `seen` what those that read no cache events remember.
"""
