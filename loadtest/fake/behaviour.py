"""What a fake server is to do, as one YAML file or Python value. What follows from it for a request is in
`truth.py`."""

from pathlib import Path
from typing import Literal

import msgspec
import yaml

from penstock_loadtest.checks import require, require_above_zero, require_not_negative
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.scenario import Lengths, Struct

FaultKind = Literal[
    "close_before_headers",  # the connection closes where the answer should begin
    "close_mid_stream",  # it closes after some tokens; of a whole answer, after half of its bytes
    "error_event",  # an error event ends the stream after some tokens
    "no_done",  # the stream ends in good order, without [DONE]
    "double_finish",  # two chunks with a finish_reason
    "wrong_usage",  # usage reports one token more than was sent
    "content_after_finish",  # one token more behind the finish_reason
    "status_500",  # instead of an answer
    "slow_headers",  # the status line comes at once, the rest of the head `delay_s` later
    "different_answer",  # not the answer that the same request got before
    "hang",  # nothing is ever sent
]
STREAM_FAULTS = frozenset({"error_event", "no_done", "double_finish", "content_after_finish"})
"""Kinds that a whole answer can't have; it is then sent without a fault."""


class Fault(Struct, frozen=True):
    kind: FaultKind
    share: float = 0.0  # of the requests, drawn; shares of several faults add up
    numbers: list[int] = []  # and these requests (0 is the first that arrived)
    after_tokens: int | None = None  # close_mid_stream, error_event: tokens sent before; None: half of them
    delay_s: float = 1.0  # slow_headers

    def __post_init__(self) -> None:
        require_not_negative(self, "share", "after_tokens", "delay_s")


class Stall(Struct, frozen=True):
    """Nothing is sent to anyone from `from_s` on; what was due meanwhile comes at the end. Seconds after the first
    request."""

    from_s: float
    for_s: float
    accepts: bool = True  # False: connections made meanwhile are reset

    def __post_init__(self) -> None:
        require_not_negative(self, "from_s", "for_s")


class Shedding(Struct, frozen=True):
    """Requests that are declined. Both limits may be set."""

    rate: float | None = None  # requests per second that are taken, as a token bucket of `burst`
    burst: int = 1
    concurrency: int | None = None  # requests in service or queued
    status: Literal[429, 503] = 429
    retry_after_s: int | None = None  # None: until the bucket has a token again, rounded up; for concurrency 1

    def __post_init__(self) -> None:
        require_above_zero(self, "rate", "burst")
        require_not_negative(self, "concurrency", "retry_after_s")


class Replicas(Struct, frozen=True):
    """The number of replicas shown at /metrics from `from_s` on (seconds after the first request; before it the first
    value holds)."""

    count: int
    from_s: float = 0.0
    pool: str = "fake"
    tier: str = "edge"


class Behaviour(Struct, frozen=True):
    """Token k of an answer is due at start + ttft + k * gap, on the monotonic clock; start is the arrival, or when a
    slot is free."""

    seed: int = 0
    # what the draws of a request depend on: arrival order; its `seed` (else its number); its prompt
    drawn_by: Literal["number", "seed", "prompt"] = "number"
    ttft_s: Lengths = Lengths(constant=0.05)
    gap_s: Lengths = Lengths(constant=0.01)
    gap_per: Literal["request", "token"] = "request"  # one gap for all tokens of an answer, or one each
    prompt_token_s: float = 0.0  # added to the TTFT for every prompt token that is not cached
    # the first chunk is due at the TTFT whatever it holds, every later one a gap per token after it
    tokens_per_chunk: Lengths = Lengths(constant=1)
    # answers end there with `stop`, unless the request ignores the end; None: at max_tokens
    output_tokens: Lengths | None = None
    default_max_tokens: int = 16  # of a request that names none
    slots: int | None = None  # requests served at once; others wait, first come first served. None: all
    shedding: Shedding | None = None
    stalls: list[Stall] = []
    faults: list[Fault] = []
    cached_tokens: int = 0  # usage reports so many for every prompt (at most its length)
    # cached tokens are instead the leading blocks of this size that earlier prompts had, by tenant and model
    prefix_block_tokens: int | None = None
    prefix_blocks: int = 100_000  # blocks remembered, least recently used go first
    models: list[str] = msgspec.field(default_factory=lambda: ["fake"])
    exact: bool | None = None  # what /v1/models reports; None: nothing
    keys: dict[str, str] = {}  # API key to tenant; none: no key is needed
    token_ids: bool = True  # return_token_ids is honoured; False: ignored
    usage: bool = True  # usage is sent (in streams when the request wants it)
    refused_fields: list[str] = []  # body fields that are answered with 400, as strict servers do
    early_headers: bool = False  # the head is sent at the start of service, not with the first token
    receipt: bool = True  # x-penstock headers: tier, replica, cached tokens, predicted TTFT
    tier: str = "edge"
    replica_names: list[str] = msgspec.field(default_factory=lambda: ["fake-0"])  # in turn
    replicas: list[Replicas] = []  # of /metrics

    def __post_init__(self) -> None:
        require_above_zero(self, "slots", "prefix_block_tokens", "default_max_tokens")
        require_not_negative(self, "prompt_token_s", "cached_tokens", "prefix_blocks")
        require(len(self.models) > 0, "models is empty; it must name one at least")
        require(len(self.replica_names) > 0, "replica_names is empty; it must name one at least")
        require(sum(fault.share for fault in self.faults) <= 1, "faults have shares that add up to more than 1")


def load_behaviour(path: Path) -> Behaviour:
    """A behaviour from YAML. Raises ScenarioInvalid with the file and what is wrong."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, Behaviour, strict=False)
    except OSError as error:
        raise ScenarioInvalid(f"{path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScenarioInvalid(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    except msgspec.ValidationError as error:
        raise ScenarioInvalid(f"{path}: {error}.") from None
