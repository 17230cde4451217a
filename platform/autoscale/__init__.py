"""The autoscaler: how many replicas each pool should have (`observe`, `demand`, `policy`, `victim`: pure but for
`observe`), and the way there. `loop` runs it inside Ray Serve, `kubernetes` beside a RayService. Not how a request is
routed, and not Ray's own placement. May import `wire`, `perf` and `base`; never router or workers.
"""
