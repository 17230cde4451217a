"""The simulator: modelled replicas under production's own routing, queue and scaling, on a clock of events.

Nothing here serves. What decides is imported from router and autoscale and runs unchanged; what computes is modelled,
with step times from measured tables. May import every other part but the command line.
"""
