"""The instrument: sends planned requests over HTTP connections of its own, and turns every response into a record.

Not when requests leave (`run`) and not what their records amount to (`results`). May import results, workload, scenario
and errors.
"""
