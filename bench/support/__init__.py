"""What benchmarks share: reports, contenders in processes of their own, clients, readers of what other programs print.

Not a benchmark: none of these modules is run by `make bench-NAME`. May import penstock and penstock_loadtest, and
nothing of the benchmarks above. Tests use some of them too.
"""
