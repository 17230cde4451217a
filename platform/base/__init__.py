"""What all other packages stand on: config loading, the environment, logs, metrics, traces, errors, Redis.

Not the meaning of any of it: metrics and spans are declared here and counted elsewhere. Imports no package of the
platform.
"""
