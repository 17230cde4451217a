"""Routing over real processes: gateway, Redis, Ray Serve and four timed replicas, loaded by the load tester.

`contest` has ours beside rivals' policies, `reuse` conversations beside pinned ones, `mooncake` a trace beside one
cache; `gateway` starts a gateway with a policy of the bench, `live_platform` everything else.
"""
