"""What outlives an autoscaler: a small record a pool, in Redis, so that the next one needs not learn it anew.

record: what is in it, pure. memory: when it is read and written. store: where.
"""
