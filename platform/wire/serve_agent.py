"""What the autoscaler asks of its hand inside a Ray cluster, and what that answers, by way of Redis.

The autoscaler of a Kubernetes cluster runs outside of Ray. Its calls wait in a list, each under a key of its own that
lapses, so that none is executed after the asker has given up on it; the answer goes to a key of its own, which lapses
as well. A RayService may have two Ray clusters at once: each has its own list.
"""

from typing import Literal

import msgspec

SERVE_AGENT_APP = "hand"
SERVE_AGENT_RESOURCE = "hand"
"""Ray's custom resource that says where it may live."""
ANSWER_S = 6.0
"""An answer comes within that, or not at all."""
LAPSE_MS = round(ANSWER_S * 1000)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A replica as Serve has it."""

    replica_id: str
    state: str
    """Serve's word: STARTING, UPDATING, RUNNING, STOPPING, ..."""
    address: str | None
    """Of its node: in Kubernetes, its pod's. None: it has none yet."""


class AppPlaces(msgspec.Struct, frozen=True, array_like=True):
    app: str
    """A Serve application: a pool's, or the gateways'."""
    target: int
    replicas: list[Place]
    """Oldest first."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """read: nothing else counts. set: the application's target, which was `was`. down: the victims go, and `target` is
    left."""

    id: str
    term: int
    """Of the leader: a call of an earlier term than one that was heard is refused."""
    op: Literal["read", "set", "down"]
    app: str = ""
    was: int = 0
    target: int = 0
    victims: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True):
    is_done: bool = True
    """False: things are not as the caller thought, and nothing was done."""
    apps: list[AppPlaces] = []
    """To a read: those that Serve knows and is not finding again."""
    error: str | None = None
    """What Ray or Serve raised; it may have been done or not."""


WANTED_KEY = "penstock:hand:wanted"
"""What the autoscaler last saw as each application's target, for whoever builds one anew."""
WANTED_MS = 3_600_000


def calls_key(cluster: str) -> str:
    """A list of call ids."""
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
    """None for what is not of this version."""
    try:
        return _calls.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_answer(data: bytes) -> Answer | None:
    """None for what is not of this version."""
    try:
        return _answers.decode(data)
    except msgspec.MsgspecError:
        return None


def decode_wanted(data: bytes) -> dict[str, int]:
    """Nothing, of what is not of this version."""
    try:
        return _wanted.decode(data)
    except msgspec.MsgspecError:
        return {}
