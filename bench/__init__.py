"""Benchmarks: `make bench-NAME` runs bench/NAME.py, which prints a table and writes bench/NAME.json.

Not what they share (`support`). May import penstock, penstock_loadtest and `bench.support`, and not each other, but for
a benchmark that measures what another one does.
"""
