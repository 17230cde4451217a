"""What crosses a process boundary: the OpenAI schema, stream frames, the load report, errors. Data only, no I/O.

Not what is done with it: that is in the packages of the two ends, `router`, `workers` and `autoscale`. May import base
alone.
"""
