"""The steps of a modelled replica by the engine's own scheduler and block pool, carried out with made-up tokens.

Slower than `batching` by two orders of magnitude; it serves loads of several tenants, whose rows and prompts the
scheduler divides, and tells tests what `batching` has to do. Its interface is the same.
"""

from collections.abc import Iterable
from typing import cast

from penstock.prefix.hashing import ChainHasher
from penstock.sim.engine import NEVER_S, EngineState
from penstock.sim.sequence import ModelledSequence
from penstock.sim.step_times import Noise, StepTimes
from penstock.wire.frames import Finish, SamplingParams, StepCosts
from penstock.workers.config import EngineConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.key_changes import KeyChanges
from penstock.workers.engine.scheduler import NO_COSTS, Scheduler
from penstock.workers.engine.sequence import Sampled, Sequence, Step

_TOKEN = Sampled(0)


class _ChainKey(bytes):
    """A block's key that knows whose it is: what the scheduler continues from."""

    seq: ModelledSequence
    number: int
    """Number of the sequence, of which its private keys are made."""
    num_blocks: int
    """Blocks up to it."""


class _KnownKeys:
    """Stands for the hasher of block keys: those of the answer are known beforehand, and private ones are made up."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._num_begun = 0

    def begin(self, seq: ModelledSequence) -> tuple[list[bytes], bytes]:
        """Keys of the prompt's full blocks, and what continues them."""
        self._num_begun += 1
        keys = self._make(seq, self._num_begun, range(seq.num_prompt_tokens // self._size))
        return keys, keys[-1] if keys else self._mark(b"", seq, self._num_begun, 0)

    def extend(self, parent: bytes, token_ids: Iterable[int]) -> list[bytes]:
        """Keys of the full blocks of `token_ids`, which follow the block of `parent`."""
        assert isinstance(parent, _ChainKey)
        added = len(list(token_ids)) // self._size
        return self._make(parent.seq, parent.number, range(parent.num_blocks, parent.num_blocks + added))

    def _make(self, seq: ModelledSequence, number: int, indices: range) -> list[bytes]:
        keys = [seq.keys[index] if index < len(seq.keys) else _private_key(number, index) for index in indices]
        if keys:
            keys[-1] = self._mark(keys[-1], seq, number, indices.stop)
        return keys

    def _mark(self, key: bytes, seq: ModelledSequence, number: int, num_blocks: int) -> _ChainKey:
        marked = _ChainKey(key)
        marked.seq, marked.number, marked.num_blocks = seq, number, num_blocks
        return marked


def _private_key(number: int, index: int) -> bytes:
    return b"\0" + number.to_bytes(8, "big") + index.to_bytes(7, "big")


def is_private(key: bytes) -> bool:
    """Whether a key is of a block that no other request can have."""
    return key.startswith(b"\0")


class RealBatching:
    """The `penstock.sim.engine.Batch` that schedules; see `penstock.sim.batching.Batching`."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        times: StepTimes,
        noise: Noise,
        report_s: float,
        costs: StepCosts = NO_COSTS,
    ) -> None:
        self._costs = costs
        self.pool = BlockPool(config.timed.num_blocks, config.block_size)
        self._keys = _KnownKeys(config.block_size)
        hasher = cast(ChainHasher, self._keys)
        self.scheduler = Scheduler(self.pool, hasher, config, max_model_len, frozenset())
        self.step_ends_s: list[float] = []
        self.finished: list[ModelledSequence] = []
        self.noted: EngineState | None = None
        self.num_output_tokens = 0
        self._times = times
        self._noise = noise
        self._report_s = report_s
        self._noted_s = -NEVER_S
        self._step = Step([], [])
        self._modelled: dict[Sequence, ModelledSequence] = {}
        self._real: dict[ModelledSequence, Sequence] = {}
        self._last_sid = 0

    def token_times(self, seq: ModelledSequence) -> list[float]:
        """Times of the tokens that a sequence has got."""
        return list(seq.token_times_s)

    def num_output(self, seq: ModelledSequence) -> int:
        """Tokens that a sequence has got."""
        return len(seq.token_times_s)

    def drain_changes(self) -> KeyChanges | None:
        """Changes of the cached keys that others may want, since the last call. Returns None if there are none."""
        changes = self.pool.drain_changes()
        if changes is None:
            return None
        stored, removed = ([key for key in keys if not is_private(key)] for keys in changes)
        return KeyChanges(stored, removed) if stored or removed else None

    def state(self) -> EngineState:
        """The numbers as they are after the last step; as `penstock.workers.engine.engine` counts them."""
        running, waiting, ahead = self.scheduler.running, self.scheduler.waiting, self.scheduler.ahead
        return EngineState(
            len(running),
            ahead.num_waiting,
            ahead.prefill_tokens,
            sum(seq.num_tokens for seq in running),
            self.pool.num_free,
            sum(seq.num_tokens for seq in waiting if not seq.is_passable),
            self._last_sid,
            len(self.step_ends_s),
            self.scheduler.num_places,
        )

    def decode(self, end_s: float, now: float) -> float:  # noqa: ARG002 (as of Batch)
        """Nothing: each step is committed."""
        return end_s

    def begin(self, now: float, submitted: list[ModelledSequence], aborted: list[ModelledSequence]) -> float:
        """Take what has come, and begin the next step. Returns its end, or NEVER_S if there is no work."""
        for seq in submitted:
            self._add(seq, now)
        for seq in aborted:
            if seq in self._real:
                self.scheduler.finish(self._real[seq], Finish.ABORT)
                self._end(seq)
        if not self.scheduler.has_work:
            return NEVER_S
        self._step = self.scheduler.schedule(self._costs, now)
        if len(self.step_ends_s) >= len(self._noise.factors):
            self._noise.extend()
        return now + self._times.at(self._step.shape) * self._noise.factors[len(self.step_ends_s)]

    def _add(self, modelled: ModelledSequence, now: float) -> None:
        self._last_sid = max(self._last_sid, modelled.sid)
        keys, chain_key = self._keys.begin(modelled)
        sampling = SamplingParams(modelled.max_tokens)
        count = modelled.num_prompt_tokens
        seq = Sequence(
            "",
            [0] * count,
            sampling,
            count,
            keys,
            chain_key,
            now,
            tenant=modelled.tenant,
            weight=modelled.weight,
            is_batch=modelled.is_batch,
            tpot_s=modelled.tpot_s,
        )
        if self.scheduler.add(seq):
            self._modelled[seq], self._real[modelled] = modelled, seq
        else:
            modelled.is_refused = True
            self.finished.append(modelled)

    def commit(self, ended_s: float) -> None:
        """Take over what the step has computed, which ended at `ended_s`."""
        self.step_ends_s.append(ended_s)
        sampled = [[_TOKEN] if chunk.is_sampled else [] for chunk in self._step.chunks]
        for output in self.scheduler.commit(self._step, sampled):
            modelled = self._modelled[output.seq]
            modelled.token_times_s += [ended_s] * len(output.token_ids)
            modelled.num_cached_tokens = output.seq.num_cached_tokens
            self.num_output_tokens += len(output.token_ids)
            if output.finish is not None:
                self._end(modelled)
        if ended_s >= self._noted_s + self._report_s or not self.scheduler.running:
            self.noted, self._noted_s = self.state(), ended_s

    def _end(self, modelled: ModelledSequence) -> None:
        seq = self._real.pop(modelled)
        del self._modelled[seq]
        modelled.num_ended_steps = len(self.step_ends_s)
        modelled.num_preemptions = seq.num_preemptions
        modelled.num_cached_tokens = seq.num_cached_tokens
        self.finished.append(modelled)
