"""Records of requests and all that is computed of them: columns, summaries, series, the ledger, intervals, costs, the
knee.

Pure: no sockets, no clock, no drawing (`report`). May import workload, scenario and errors.
"""
