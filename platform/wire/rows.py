"""The rows in the tables of request fields (`wire.fields`): what becomes of a field, and why it is refused."""

from typing import Literal, NamedTuple

Verdict = Literal["honoured", "harmless", "refused"]


class Refusal(NamedTuple):
    """Why a field is refused."""

    sentence: str
    accepted: tuple[object, ...] = ()
    """Values besides null that are accepted."""


class Row(NamedTuple):
    """What becomes of one field."""

    verdict: Verdict
    refusal: Refusal | None = None
    """Set where the field is refused."""
