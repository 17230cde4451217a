"""What crosses a process boundary: the OpenAI schema, stream frames, the load report, errors. Data only, no I/O.

Not what the data means: that is the affair of the gateway and the replica at the two ends. May import base alone.
"""
