"""The timed runner: tokens that are a hash of their history, in steps that take a measured time. The engine around it
is the real one.

Not a model: its text means nothing, but it can be checked. A token depends on the seed and on every token before it,
and the hash of the history is kept per KV block, as KV is: a resumed sequence goes on as if nothing had happened, and a
prefix hit on a wrong block shows as a wrong token. A pool of any speed and cache size can be simulated on few cores,
because a step sleeps.

Step times come from constants (`TimedConfig`) or from a table, a JSON file:

    {"decode_rows": [0, 1, 8, 64], "prefill_tokens": [0, 64, 512], "kv_tokens": [0, 4096, 65536],
     "seconds": [[[...], ...], ...]}

Axes increase strictly and have two points or more; `seconds[i][j][k]` is the measured time of a step with
decode_rows[i] sequences that decode, prefill_tokens[j] prompt tokens, and kv_tokens[k] context tokens read by the
decode rows. Between points times are interpolated linearly on each axis; beyond the last point the last interval's
slope goes on, before the first its value stays. Prompts of the grid begin at position 0: where a piece attends to more
than that, each further pair of a prompt token and a context token takes `attention_s` (0 unless it is given). Where an
engine computes a step with a short prompt in it otherwise (this one on CPUs: more exactly), `short_seconds` is a second
grid on the same axes, for steps that read a prompt of fewer than `short_prompt_tokens` to its end, whatever else is in
them. `source` says where the numbers come from, and `noise` is the standard deviation of measured steps as a part of
their time, which the simulator draws and the timed runner leaves out. A draft token takes `draft_token_s`, and
`draft_acceptance` of them are right, whatever method of speculation the settings name.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

from penstock.adapters.store import digest_of
from penstock.base.errors import ConfigError
from penstock.perf.fit import StepSample, fit
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint, StepCosts, pack_token_ids
from penstock.workers.config import EngineConfig, TimedConfig
from penstock.workers.engine.sequence import Chunk, Grammar, Resident, Sampled, Sequence, Step, StepShape

CATCH_UP_S = 0.002
"""A step that begins at most this long after the last one's end counts from that end: the engine's own work between
steps does not add up."""

_DEEP_TOKENS = 8192
"""Context before a piece of a prompt, for the fit of what attention to it takes."""
_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads neighbouring hashes
_MASK = 2**64 - 1


class StepTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured step times on a grid; see the module's text."""

    decode_rows: list[int]
    prefill_tokens: list[int]
    kv_tokens: list[int]
    seconds: list[list[list[float]]]
    attention_s: float = 0.0
    noise: float = 0.0
    source: str = ""
    short_prompt_tokens: int = 0
    short_seconds: list[list[list[float]]] | None = None

    def __post_init__(self) -> None:
        for name in ("decode_rows", "prefill_tokens", "kv_tokens"):
            axis = getattr(self, name)
            if len(axis) < 2 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"the axis {name} must have two points or more and increase, not {axis}")
        sizes = len(self.decode_rows), len(self.prefill_tokens), len(self.kv_tokens)
        for name in ("seconds", "short_seconds"):
            grid = getattr(self, name)
            if grid is not None and not _is_full(grid, sizes):
                raise ValueError(f"{name} must be a grid of {sizes[0]} x {sizes[1]} x {sizes[2]} numbers")
        if (self.short_seconds is None) != (self.short_prompt_tokens == 0):
            raise ValueError("short_seconds and short_prompt_tokens belong together: give both or neither")
        if min(self.attention_s, self.noise, self.short_prompt_tokens) < 0:
            raise ValueError(
                f"attention_s ({self.attention_s}), noise ({self.noise}) and short_prompt_tokens "
                f"({self.short_prompt_tokens}) can't be negative"
            )

    def at(self, shape: StepShape) -> float:
        """Seconds of a step, by trilinear interpolation, and the attention that the grid does not hold."""
        i, x = _locate(self.decode_rows, shape.decode_rows)
        j, y = _locate(self.prefill_tokens, shape.prefill_tokens)
        k, z = _locate(self.kv_tokens, shape.kv_tokens)
        grid = self.seconds
        if self.short_seconds is not None and 0 < shape.shortest_prompt < self.short_prompt_tokens:
            grid = self.short_seconds
        lower, upper = _interpolate(grid[i], j, y, k, z), _interpolate(grid[i + 1], j, y, k, z)
        deeper = shape.query_context - shape.prefill_tokens * (shape.prefill_tokens + 1) / 2
        return max(0.0, lower + x * (upper - lower)) + self.attention_s * max(0.0, deeper)

    def decode_times(self, decode_rows: int) -> list[float]:
        """Seconds of a step without prompts at each point of the axis `kv_tokens`."""
        i, x = _locate(self.decode_rows, decode_rows)
        j, y = _locate(self.prefill_tokens, 0)
        return [
            _mix(_mix(a, b, y), _mix(c, d, y), x)
            for (a, b), (c, d) in zip(
                zip(self.seconds[i][j], self.seconds[i][j + 1], strict=True),
                zip(self.seconds[i + 1][j], self.seconds[i + 1][j + 1], strict=True),
                strict=True,
            )
        ]

    @property
    def costs(self) -> StepCosts:
        """The coefficients that fit the grids best, with prompts at their start and, where pieces further on take
        longer, behind _DEEP_TOKENS."""
        grids = [self.seconds] if self.short_seconds is None else [self.seconds, self.short_seconds]
        return fit(
            [
                StepSample(
                    rows + (prefill > 0),
                    prefill,
                    prefill * (prefill + 1) / 2 + depth * prefill,
                    kv,
                    0,
                    grid[i][j][k] + self.attention_s * depth * prefill,
                )
                for grid in grids
                for depth in ((0, _DEEP_TOKENS) if self.attention_s else (0,))
                for (i, rows), (j, prefill), (k, kv) in product(
                    enumerate(self.decode_rows), enumerate(self.prefill_tokens), enumerate(self.kv_tokens)
                )
                if rows + prefill and (prefill or not (depth or grid is self.short_seconds))
            ]
        )


def load_table(path: str) -> StepTable:
    """Raises ConfigError for a file that is missing or is not a step table."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=StepTable)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"engine.timed.table: {path} is no step table: {error}") from error


class TimedAdapter(NamedTuple):
    """An adapter of which only the identity counts: histories begin with it."""

    digest: str


class _History(NamedTuple):
    """Hash of a running sequence's tokens, and the one from which the last step began: a step may be run again."""

    end: int
    """Number of tokens hashed."""
    state: int
    start: int
    start_state: int


class TimedRunner:
    """A runner (see `penstock.workers.engine.runner.Runner`) without a model.

    Never ends a sequence by itself: `eos_token_ids` are never chosen. clock and sleep: monotonic seconds. choices: the
    ids that are chosen among; none: all of the vocabulary.
    """

    is_asynchronous = False
    stairs = None
    has_constraints = False

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        choices: Collection[int] = (),
    ) -> None:
        timed = config.timed
        self.num_blocks = timed.num_blocks
        self.max_model_len = min(
            timed.max_model_len, config.max_model_len or timed.max_model_len, timed.num_blocks * config.block_size
        )
        self.eos_token_ids = eos_token_ids
        table = load_table(timed.table) if timed.table is not None else None
        self.costs = (
            timed.costs if table is None else msgspec.structs.replace(table.costs, draft_token_s=timed.draft_token_s)
        )
        self._step_time_s = table.at if table is not None else _make_constant_times(timed)
        self._draft_token_s = timed.draft_token_s
        self._vocab_size = timed.vocab_size
        self._choices = tuple(index for index in choices if index < timed.vocab_size and index not in eos_token_ids)
        if len(self._choices) < len(choices) / 2:
            raise ConfigError(
                f"engine.timed.vocab_size: {timed.vocab_size} leaves {len(self._choices)} of the {len(choices)} words "
                "of which answers are to consist"
            )
        self._draft_acceptance = timed.draft_acceptance
        self._block_size = config.block_size
        self._clock = clock
        self._sleep = sleep
        self._ended_s = clock()
        self._kv = [0] * timed.num_blocks
        """Hash of the history up to the end of each full block, by block number: what KV is to a model."""
        self._histories: dict[Sequence, _History] = {}

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        """Compute the step, and sleep for as long as it takes."""
        now = self._clock()
        begin_s = self._ended_s if now - self._ended_s <= CATCH_UP_S else now
        sampled = [self._compute(chunk) for chunk in step.chunks]
        shape = step.shape
        self._ended_s = begin_s + self._step_time_s(shape) + self._draft_token_s * shape.draft_tokens
        left_s = self._ended_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return lambda: sampled

    def can_run_ahead(self, step: Step) -> bool:  # noqa: ARG002 (as of Runner)
        return False

    def load_adapter(self, digest: str, folder: Path, max_rank: int) -> TimedAdapter:  # noqa: ARG002 (as of Runner)
        """Raises InvalidRequest for files that are not those of the digest, OSError."""
        if digest_of(folder) != digest:
            raise InvalidRequest("its files are not those of its digest.")
        return TimedAdapter(digest)

    def unload_adapter(self, adapter: Resident) -> None:
        """Do nothing: an adapter holds nothing here."""

    def forget_adapter(self, digest: str) -> None:
        """Do nothing: an adapter holds nothing here."""

    def compile_grammar(self, constraint: Constraint, tenant: str, output: list[int]) -> Grammar:  # noqa: ARG002 (as of Runner)
        """Raises InvalidRequest: made-up tokens keep to nothing."""
        raise InvalidRequest("This pool makes its tokens up; they can't keep to a schema, grammar, pattern or choice.")

    def forget(self, seq: Sequence) -> None:
        self._histories.pop(seq, None)

    def _compute(self, chunk: Chunk) -> list[Sampled]:
        seq, start, end = chunk.seq, chunk.start, chunk.start + chunk.num_tokens
        begin = self._state_before(seq, start)
        state = (
            self._write_token(seq, start, seq.token_ids[start], begin)
            if chunk.num_tokens == 1
            else self._prefill(seq, start, end, begin)
        )
        self._histories[seq] = _History(end, state, start, begin)
        return self._choose(chunk, state) if end == len(seq.token_ids) else []

    def _state_before(self, seq: Sequence, start: int) -> int:
        """Hash of the sequence's first `start` tokens."""
        history = self._histories.get(seq)
        if history is not None and history.end == start:
            return history.state
        if history is not None and history.start == start:  # the step failed, and is run again
            return history.start_state
        # new, admitted again after a preemption, or behind a prefix that was found
        return self._kv[seq.block_table[start // self._block_size - 1]] if start else _root_state(seq)

    def _choose(self, chunk: Chunk, state: int) -> list[Sampled]:
        """Choose the next token and, where places for a draft are given, draft tokens that are right until the first
        pseudo-random miss."""
        seq = chunk.seq
        token_id = self._token_after(state, seq.sampling.seed)
        sampled = [Sampled(token_id)]
        if not chunk.max_drafts:
            return sampled
        draft: list[int] = []
        for position in range(chunk.end, chunk.end + chunk.max_drafts):
            if not self._is_accepted(state):
                draft.append((token_id + 1) % self._vocab_size)
                break
            draft.append(token_id)
            state = self._write_token(seq, position, token_id, state)
            self._histories[seq] = self._histories[seq]._replace(end=position + 1, state=state)
            token_id = self._token_after(state, seq.sampling.seed)
            sampled.append(Sampled(token_id))
        chunk.draft = draft + [token_id] * (chunk.max_drafts - len(draft))
        return sampled

    def _is_accepted(self, state: int) -> bool:
        """Whether a draft token is right: pseudo-random from the history, so that a run can be repeated."""
        return (state ^ state >> 15) * _ODD % 2**32 < self._draft_acceptance * 2**32

    def _write_token(self, seq: Sequence, position: int, token_id: int, state: int) -> int:
        """Add one token to the history, whose hash is kept where a block ends; returns the new hash."""
        state = crc32(token_id.to_bytes(4, "little"), state)
        if not (position + 1) % self._block_size:
            self._kv[seq.block_table[position // self._block_size]] = state
        return state

    def _prefill(self, seq: Sequence, start: int, end: int, state: int) -> int:
        size = self._block_size
        packed = memoryview(pack_token_ids(seq.token_ids[start:end]))
        position = start
        while position < end:
            until = min(end, (position // size + 1) * size)
            state = crc32(packed[4 * (position - start) : 4 * (until - start)], state)
            if not until % size:
                self._kv[seq.block_table[position // size]] = state
            position = until
        return state

    def _token_after(self, state: int, seed: int) -> int:
        mixed = ((state + 1) * _ODD ^ seed * 0xD1342543DE82EF95) & _MASK
        drawn = (mixed ^ mixed >> 32) * _ODD % 2**61
        if self._choices:
            return self._choices[drawn % len(self._choices)]
        token_id = drawn % self._vocab_size
        while token_id in self.eos_token_ids:
            token_id = (token_id + 1) % self._vocab_size
        return token_id


def _root_state(seq: Sequence) -> int:
    return 0 if seq.lora is None else crc32(seq.lora.digest.encode())


def _make_constant_times(timed: TimedConfig) -> Callable[[StepShape], float]:
    base_s, row_s, prefill_token_s, kv_token_s = timed.base_s, timed.row_s, timed.prefill_token_s, timed.kv_token_s
    return lambda shape: (
        base_s + row_s * shape.decode_rows + prefill_token_s * shape.prefill_tokens + kv_token_s * shape.kv_tokens
    )


def _mix(lower: float, upper: float, share: float) -> float:
    return lower + share * (upper - lower)


def _locate(axis: list[int], value: int) -> tuple[int, float]:
    """The interval of `axis` for `value`, and the place in it: 0 at its begin, 1 at its end, more beyond the last
    point."""
    index = bisect_right(axis, value, 1, len(axis) - 1) - 1
    begin = axis[index]
    return index, (value - begin) / (axis[index + 1] - begin) if value > begin else 0.0


def _is_full(grid: list[list[list[float]]], sizes: tuple[int, int, int]) -> bool:
    return len(grid) == sizes[0] and all(
        len(plane) == sizes[1] and all(len(line) == sizes[2] for line in plane) for plane in grid
    )


def _interpolate(plane: list[list[float]], j: int, y: float, k: int, z: float) -> float:
    begin, end = plane[j], plane[j + 1]
    lower, upper = begin[k] + z * (begin[k + 1] - begin[k]), end[k] + z * (end[k + 1] - end[k])
    return lower + y * (upper - lower)
