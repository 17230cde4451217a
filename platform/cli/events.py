"""What Ray's driver process tells `penstock up`: one JSON object a line."""

import msgspec

RAY = "ray"
"""Ray runs."""
DEPLOYED = "deployed"
"""Serve says that every application runs."""
FAILED = "failed"
"""It will not come up; message and detail say why."""


class Event(msgspec.Struct, frozen=True):
    name: str
    message: str = ""
    """For FAILED: one sentence."""
    detail: str = ""
    """What Serve or a log said."""
