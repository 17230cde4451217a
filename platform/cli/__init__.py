"""The `penstock` command: the composition root of the platform."""
