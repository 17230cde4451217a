"""Events of Ray's driver process, reported to `penstock up`: one JSON object a line."""

import msgspec

RAY = "ray"
"""Ray runs."""
DEPLOYED = "deployed"
"""Every application runs, by Serve's account."""
FAILED = "failed"
"""The platform will not come up; message and detail give the reason."""


class Event(msgspec.Struct, frozen=True):
    name: str
    message: str = ""
    """Reason of FAILED, one sentence."""
    detail: str = ""
    """Further lines of that reason, from Serve or a log."""
