"""The autoscaler: how many replicas each pool should have (`observe`, `demand`, `policy`, `victim`: pure but for
`observe`), and the way there. `loop` runs it inside Ray Serve, `kubernetes` beside a RayService. It shares nothing with
gateways and replicas but messages of `wire` and the performance model of `perf`, and imports nothing above them.
"""
