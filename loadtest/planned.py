"""A planned request: what a workload yields, in order of intended times."""

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]
Prompt = str | list[int]
"""Text, or token ids (completions only)."""


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or one turn of a session."""

    index: int  # 0, 1, 2, ... in the order of intended times
    # intended time after the run's start; a later turn's is max(at_s, end of the previous answer + think_s)
    at_s: float
    endpoint: Endpoint = "chat"
    prompt: Prompt = ""  # completions: the prompt; chat: the user's message of this turn
    system: str | None = None  # chat: the system message of the first turn
    max_tokens: int
    ignore_eos: bool = False  # request exactly max_tokens, where the server can
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = True
    tenant: str = "default"
    kind: str = "requests"  # name of the scenario's kind it was drawn from
    model: str | None = None  # None: the model of the target
    cancel_after_s: float | None = None  # hang up so long after sending, if it has not ended
    session: str | None = None  # turns of one session go one after another; each sends the real answers before it
    turn: int = 0
    is_last_turn: bool = True
    think_s: float = 0.0  # pause of the user between the previous answer's end and this turn
