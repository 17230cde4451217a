"""What follows for a request from a behaviour: its chunks and their times, its fault, and what became of it. Pure: no
clock, no socket.

Everything drawn for a request depends on the behaviour's seed, on what is drawn and on the request's key (its number,
its `seed` field or its prompt, see `Behaviour.drawn_by`), and on nothing else. So a test computes what was programmed
without a request to the server.
"""

import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from penstock_loadtest.fake.behaviour import STREAM_FAULTS, Behaviour, Fault, FaultKind, Replicas, Stall
from penstock_loadtest.scenario import Lengths

_P99 = NormalDist().inv_cdf(0.99)


class Chunk(NamedTuple):
    """A programmed chunk of an answer."""

    offset_s: float
    """Seconds after the start at which it is due."""
    tokens: int


class Truth(msgspec.Struct, kw_only=True):
    """What was programmed for a request, and what became of it. Times are CLOCK_MONOTONIC seconds: `time.perf_counter`
    of any process of the machine."""

    number: int
    request_id: str
    key: int  # what its draws depend on
    tenant: str
    model: str
    endpoint: str
    stream: bool
    arrival_s: float
    outcome: Literal["open", "finished", "failed", "shed", "gone"] = "open"  # gone: the client hung up
    start_s: float | None = None  # its slot's
    end_s: float | None = None  # when its last byte was due, or the client hung up
    late_s: float = 0.0  # the most that any of its bytes left after they were due: the fake server's own fault
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0  # of the whole answer
    sent_tokens: int = 0
    fault: FaultKind | None = None
    status: int = 200

    def chunks(self, behaviour: Behaviour) -> list[Chunk]:
        """The programmed chunks of the request, faults left out."""
        return program_chunks(
            behaviour, self.key, tokens=self.tokens, uncached_tokens=self.prompt_tokens - self.cached_tokens
        )


def program_chunks(behaviour: Behaviour, key: int, *, tokens: int, uncached_tokens: int) -> list[Chunk]:
    """The chunks of an answer of `tokens` tokens."""
    rng = _rng(behaviour, "timing", key)
    offset_s = compute_quantile(behaviour.ttft_s, rng.random()) + behaviour.prompt_token_s * uncached_tokens
    gap_s = compute_quantile(behaviour.gap_s, rng.random())
    chunks: list[Chunk] = []
    left = tokens
    while left > 0:
        size = min(left, max(1, round(compute_quantile(behaviour.tokens_per_chunk, rng.random()))))
        if chunks and behaviour.gap_per == "token":
            offset_s += sum(compute_quantile(behaviour.gap_s, rng.random()) for _ in range(size))
        elif chunks:
            offset_s += size * gap_s
        chunks.append(Chunk(offset_s, size))
        left -= size
    return chunks


def draw_answer_length(behaviour: Behaviour, key: int, *, max_tokens: int, ignore_eos: bool) -> int:
    if behaviour.output_tokens is None or ignore_eos:
        return max_tokens
    return min(
        max_tokens, max(1, round(compute_quantile(behaviour.output_tokens, _rng(behaviour, "length", key).random())))
    )


def draw_fault(behaviour: Behaviour, number: int, *, stream: bool) -> Fault | None:
    """The fault of a request, drawn by its number whatever `drawn_by` is; of several that name it, the first."""
    if not behaviour.faults:
        return None
    named = [fault for fault in behaviour.faults if number in fault.numbers]
    drawn = _by_share(behaviour.faults, _rng(behaviour, "fault", number).random())
    fault = named[0] if named else drawn
    return None if fault is not None and fault.kind in STREAM_FAULTS and not stream else fault


def _by_share(faults: list[Fault], u: float) -> Fault | None:
    for fault in faults:
        if u < fault.share:
            return fault
        u -= fault.share
    return None


def shift_past_stalls(stalls: list[Stall], due_s: float) -> float:
    """The time at which something due at `due_s` is sent; both in seconds after the first request."""
    for stall in sorted(stalls, key=lambda stall: stall.from_s):
        if stall.from_s <= due_s < stall.from_s + stall.for_s:
            due_s = stall.from_s + stall.for_s
    return due_s


def refuses_connections(stalls: list[Stall], at_s: float) -> bool:
    return any(not stall.accepts and stall.from_s <= at_s < stall.from_s + stall.for_s for stall in stalls)


def count_replicas(replicas: list[Replicas], at_s: float) -> dict[tuple[str, str], int]:
    """Count of every (pool, tier) at a time."""
    counts: dict[tuple[str, str], int] = {}
    for entry in sorted(replicas, key=lambda entry: entry.from_s):
        if entry.from_s <= at_s or (entry.pool, entry.tier) not in counts:
            counts[entry.pool, entry.tier] = entry.count
    return counts


def compute_quantile(lengths: Lengths, u: float) -> float:
    """Value of a distribution below which the share `u` in [0, 1) lies."""
    if lengths.constant is not None:
        value = lengths.constant
    elif lengths.uniform is not None:
        value = lengths.uniform[0] + u * (lengths.uniform[1] - lengths.uniform[0])
    elif lengths.lognormal is not None:
        median, p99 = lengths.lognormal
        value = median * math.exp(math.log(p99 / median) / _P99 * NormalDist().inv_cdf(max(u, 1e-12)))
    else:
        assert lengths.choices is not None, "Lengths refuses to be made without a distribution"
        value = lengths.choices[int(u * len(lengths.choices))]
    return min(max(value, lengths.min), lengths.max)


def _rng(behaviour: Behaviour, what: str, key: int) -> random.Random:
    return random.Random(f"{behaviour.seed} {what} {key}")


_encode = msgspec.json.Encoder().encode


def write_truth(file: BinaryIO, truth: Truth) -> None:
    """Append a truth as a line of JSON."""
    file.write(_encode(truth) + b"\n")


def read_truths(path: Path) -> list[Truth]:
    """The truths of a file, in order of arrival."""
    decode = msgspec.json.Decoder(Truth).decode
    return sorted((decode(line) for line in path.read_bytes().splitlines()), key=lambda truth: truth.number)
