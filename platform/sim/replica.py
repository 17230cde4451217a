"""A modelled replica as its gateway has it: the engine's steps, and the frames that they become.

Frames go to the gateway's own client of the replica, with the delays of the stream: a load at most every REPORT_S, one
that has become idle at once. Tokens are not carried: a request's times are read from the engine at its end. Invariant:
what is delivered at `now` is what has happened until `now`, in order.
"""

from typing import NamedTuple

from penstock.perf.turnover import RowTurnover
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.sim.batching import Batching, is_uniform
from penstock.sim.engine import Engine, EngineState
from penstock.sim.real_batching import RealBatching
from penstock.sim.request import SimulatedRequest
from penstock.sim.sequence import ModelledSequence
from penstock.sim.step_times import Noise, StepTimes
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import BlockEvents, Delta, DownFrame, Finish, Load, StepCosts
from penstock.wire.targets import CLASSES, NO_TARGETS, ClassTargets
from penstock.workers.config import EngineConfig
from penstock.workers.serving.load import grant_credit
from penstock.workers.serving.outbox import REPORT_S


class SimulatedMember(NamedTuple):
    """The replica as discovery would list it."""

    replica_id: str
    pool: str
    block_size: int
    max_model_len: int
    model_digest: str = "simulated"
    address: str = ""
    epoch: str = "simulated"
    protocol: int = 0
    stream_key_id: str = ""
    abilities: frozenset[str] = frozenset()
    has_private_prefixes: bool = False
    start: StartTimes | None = None


class SilentLink:
    """Stands for the stream up to the replica: sequences are given to it without messages."""

    def submit(self, submit: object) -> None: ...
    def abort(self, sid: int) -> None: ...
    def announce(self) -> None: ...
    def load_adapter(self, digest: str, tenant: str = "") -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class Timing(NamedTuple):
    """Step times of a pool's replicas: the true ones, and the costs that replicas report."""

    times: StepTimes
    reported: StepCosts


class SimulatedReplica:
    """One replica that is ready."""

    def __init__(
        self,
        client: ReplicaClient,
        config: EngineConfig,
        timing: Timing,
        noise: Noise,
        *,
        has_tenants: bool,
        targets: ClassTargets,
    ) -> None:
        """has_tenants: whether sequences of several tenants come, among whom the scheduler divides its rows. targets:
        by class."""
        self.client = client
        self.is_draining = False
        kept = targets if config.keep_tpot else NO_TARGETS
        paces = {tpot_s for name in CLASSES if (tpot_s := kept.of(name).tpot_s) is not None}
        max_len = config.timed.max_model_len
        is_counted = not has_tenants and all(is_uniform(timing.reported, tpot_s, max_len) for tpot_s in paces)
        make = Batching if is_counted else RealBatching
        self.engine = Engine(make(config, config.timed.max_model_len, timing.times, noise, REPORT_S, timing.reported))
        self.batch = self.engine.batch
        self._config = config
        self._costs = timing.reported
        self._targets = kept
        self._requests: dict[ModelledSequence, SimulatedRequest] = {}
        self._event_seq = 0
        self._turnover = RowTurnover()
        self._num_ended = 0
        """Sequences that have ended since the turnover was last told."""
        client.open()
        client.attach(SilentLink(), BlockEvents(0, is_snapshot=True))
        client.on_frame(DownFrame([], self._make_load(self.batch.state())))

    @property
    def num_live(self) -> int:
        return len(self._requests)

    @property
    def live_requests(self) -> list[SimulatedRequest]:
        return list(self._requests.values())

    def submit(self, request: SimulatedRequest, sid: int, keys: list[bytes], now: float) -> None:
        """Take a sequence."""
        seq = request.seq = ModelledSequence(
            sid,
            request.num_prompt_tokens,
            request.max_tokens,
            keys,
            tenant=request.planned.tenant,
            weight=request.share.rate,
            is_batch=request.share.service_class == "batch",
            tpot_s=self._targets.of(request.share.service_class).tpot_s,
        )
        request.count_output = self.batch.num_output
        self._requests[seq] = request
        self.engine.submit(seq, now)

    def abort(self, request: SimulatedRequest, now: float) -> None:
        """Drop a request's sequence."""
        if request.seq in self._requests:
            request.token_times_s = self.batch.token_times(request.seq)
            del self._requests[request.seq]
            self.client.abort(request.sid)
            self.engine.abort(request.seq, now)

    def deliver(self, now: float) -> None:
        """Give the gateway what has come of the steps that ended until `now`."""
        self.engine.advance(now)
        batch = self.batch
        state, batch.noted = batch.noted, None
        ended, batch.finished = batch.finished, []
        later: list[Delta] = []
        frames: list[Delta] = []
        for seq in ended:
            if seq in self._requests:
                delta = Delta(seq.sid, [], Finish.REFUSED if seq.is_refused else Finish.LENGTH)
                is_reported = state is not None and seq.sid <= state.last_sid and seq.num_ended_steps <= state.num_steps
                (frames if is_reported else later).append(delta)
        self._num_ended += len(ended)
        if state is not None:
            self._turnover.note(now, state.num_running, self._num_ended)
            self._num_ended = 0
        if frames or state is not None:
            load = None if state is None else self._make_load(state)
            self.client.on_frame(DownFrame(frames, load, self._drain_events()))
        if later:
            self.client.on_frame(DownFrame(later))

    def report(self) -> None:
        """Send a load at once, as on a change of credit."""
        self.client.on_frame(DownFrame([], self._make_load(self.batch.state()), self._drain_events()))

    def take_ended(self, request: SimulatedRequest) -> None:
        """Forget a request whose last delta has been delivered."""
        assert request.seq is not None
        request.token_times_s = request.seq.token_times_s
        del self._requests[request.seq]

    def _drain_events(self) -> list[BlockEvents] | None:
        changes = self.batch.drain_changes()
        if changes is None:
            return None
        self._event_seq += 1
        return [BlockEvents(self._event_seq, b"".join(changes.stored), b"".join(changes.removed))]

    def _make_load(self, state: EngineState) -> Load:
        lacks_kv = state.unplaced_tokens > state.free_blocks * self._config.block_size
        num_inflight = len(self._requests)
        credit = grant_credit(
            num_inflight,
            num_inflight,
            1,
            state.num_places,
            is_closed=self.is_draining or lacks_kv,
        )
        return Load(
            self.client.member.epoch,
            self._event_seq,
            credit,
            state.num_running,
            state.num_waiting,
            state.prefill_tokens,
            state.kv_tokens,
            state.free_blocks,
            self._config.timed.num_blocks,
            self._costs,
            self._config.token_budget,
            self.is_draining,
            last_sid=state.last_sid,
            max_running=self._config.max_num_seqs,
            row_hold_s=self._turnover.row_hold_s,
        )
