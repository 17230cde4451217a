"""Autoscalers on the same traces, in the simulator: this platform's, its rivals', fixed numbers of replicas, and an
oracle that sees the future.

Rooms: `rivals` has the other autoscalers' formulas. Everything is simulated; nothing here is a measurement of a real
replica.
"""
