"""Every parser of bytes from outside, as a fuzz target: what it is given, and the errors that it may answer with."""

from tests.fuzz.check import Target
from tests.fuzz.file_targets import FILE_TARGETS
from tests.fuzz.http_targets import HTTP_TARGETS
from tests.fuzz.peer_targets import PEER_TARGETS

TARGETS: dict[str, Target] = HTTP_TARGETS | PEER_TARGETS | FILE_TARGETS
"""The targets by name."""
