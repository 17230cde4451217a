"""What beside its load has a say in how many replicas a pool may have: the clock (`windows`, `schedules`),
other pools (`budget`), and what there is no room for (`shortage`). Each narrows
the pool's `range` before the policy decides, and names itself. Pure.
"""
