"""`penstock plan`: what fits where, how fast, at what price, before anything is bought or started.

Not the arithmetic (`perf.planning`): here are the questions, what they are answered from (a checkpoint's headers, this
machine, a running platform, a trace), and the answers as pages.
"""
