"""The performance model: step time, prediction of TTFT and TPOT, capacity, and the fit of the coefficients. Pure.

Not the measuring (the engine probes itself) and not the decisions (`router.routing`, `autoscale`). May import wire and
base; never prefix or text.
"""
