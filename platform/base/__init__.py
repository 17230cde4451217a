"""Config loading, logs, metric names, Redis: what everything else stands on."""
