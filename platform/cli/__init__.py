"""The `penstock` command: the composition root of the platform on one machine, and what operators run.

Holds commands, their configuration and the processes they start. Not the work of gateways, replicas or the autoscaler.
May import every other package; nothing imports it.
"""
