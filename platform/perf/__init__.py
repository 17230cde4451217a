"""The performance model: step time, TTFT and TPOT prediction. Pure."""
