"""Messages between the autoscaler of a Kubernetes cluster, which runs outside of Ray, and its agent inside a Ray
cluster, and the keys of Redis by which they travel.

Calls wait in a list, each under a key of its own that lapses, so that none is executed after its sender has given up on
it; the answer goes to a key of its own, which lapses as well. A RayService may have two Ray clusters at once: each has
its own list.

The keys keep the name that the agent had before (`hand`): while a platform is upgraded, the new autoscaler speaks to
the agent of the old Ray cluster, and hands its targets over to the new one.
"""

from typing import Literal

import msgspec

SERVE_AGENT_APP = "serve-agent"
SERVE_AGENT_RESOURCE = "serve_agent"
"""Ray's custom resource of the nodes on which the agent may run."""
ANSWER_S = 6.0
"""Longest wait for an answer, in seconds."""
LAPSE_MS = round(ANSWER_S * 1000)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One replica and where it runs."""

    replica_id: str
    state: str
    """Serve's name of the state: STARTING, UPDATING, RUNNING, STOPPING, ..."""
    address: str | None
    """IP address of its node, which in Kubernetes is its pod; None: it has none yet."""


class AppPlaces(msgspec.Struct, frozen=True, array_like=True):
    """Target and replicas of one Serve application."""

    app: str
    """A pool's application, or the gateways'."""
    target: int
    replicas: list[Place]
    """All replicas, the oldest first."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request to the agent. read: the other fields do not count. set: sets the application's target, which was `was`.
    down: stops the victims and leaves `target` replicas."""

    id: str
    term: int
    """The leader's term: a call of an earlier term than one that was received is refused."""
    op: Literal["read", "set", "down"]
    app: str = ""
    was: int = 0
    target: int = 0
    victims: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The agent's answer to a call."""

    is_done: bool = True
    """Whether the call was executed. False if the state was not what the caller assumed; then nothing was done."""
    apps: list[AppPlaces] = []
    """Result of a read: the applications that Serve knows and is not recovering."""
    error: str | None = None
    """Class of the exception that Ray or Serve raised; the call may have been executed or not."""


WANTED_KEY = "penstock:hand:wanted"
"""Every application's target as the autoscaler last read it, for the process that builds the application anew."""
WANTED_MS = 3_600_000


def calls_key(cluster: str) -> str:
    """Key of the list of call ids for a Ray cluster."""
    return f"penstock:hand:calls:{cluster}"


def call_key(call_id: str) -> str:
    return f"penstock:hand:call:{call_id}"


def answer_key(call_id: str) -> str:
    return f"penstock:hand:answer:{call_id}"


_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)
_wanted = msgspec.msgpack.Decoder(dict[str, int])


def encode(message: Call | Answer | dict[str, int]) -> bytes:
    return _encoder.encode(message)


def decode_call(data: bytes) -> Call | None:
    """Decodes a call. Returns None if the bytes are not a call of this version."""
    try:
        return _calls.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_answer(data: bytes) -> Answer | None:
    """Decodes an answer. Returns None if the bytes are not an answer of this version."""
    try:
        return _answers.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_wanted(data: bytes) -> dict[str, int]:
    """Decodes the targets by application. Returns an empty dictionary if the bytes are not targets of this version."""
    try:
        return _wanted.decode(data)
    except msgspec.MsgspecError:
        return {}
