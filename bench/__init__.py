"""Benchmarks: `make bench-NAME` runs bench/NAME.py, which prints a table and writes bench/NAME.json."""
