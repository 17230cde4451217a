"""What a parser finds in an answer: content, and calls piece by piece."""

from typing import NamedTuple


class Content(NamedTuple):
    """Text that belongs to no call."""

    text: str


class CallBegin(NamedTuple):
    """A call begins; its arguments follow."""

    number: int
    """Number of the call within the answer; 0 is the first."""
    name: str


class CallArguments(NamedTuple):
    """The next part of a call's arguments: JSON of an object, as the model wrote it."""

    number: int
    text: str


class CallEnd(NamedTuple):
    """A call is complete: it has a name, and its arguments are a JSON object."""

    number: int


Event = Content | CallBegin | CallArguments | CallEnd
