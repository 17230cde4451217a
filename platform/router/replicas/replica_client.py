"""The client of one replica: its link, its latest load, what was sent since, and this router's live sequences there.

Not a connection (that is the link's affair) and not a choice (policy). Invariants: a live sequence gets each of its
deltas once, in order, and after its last one, or after `lose`, nothing more; a replica that has no link or load, or
retires, is not ready, and nothing is submitted to it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.metrics import Metrics
from penstock.prefix.index import ApplyResult
from penstock.router.replicas.adapter_waits import AdapterWaits
from penstock.router.replicas.index_feed import BlockFeed
from penstock.router.replicas.traffic import PoolTraffic
from penstock.router.routing.chains import ChainKind
from penstock.router.routing.policy import ReplicaView, UnreportedWork
from penstock.router.routing.spending import Spending
from penstock.wire.discovery import StartTimes
from penstock.wire.frames import AdapterCount, BlockEvents, Delta, DownFrame, Load, Submit, TimeAccounts

MAX_ADAPTER_COUNTS = 1024
"""Adapters whose counts are held, those that changed last; the replica remembers as many."""
ADAPTER_LOAD_S = 0.2
"""Expected wait of a request whose adapter has to be loaded first; measured: 0.05 s to 0.5 s."""


class Member(Protocol):
    """A replica as discovery lists it; equal id and epoch are the same process."""

    @property
    def replica_id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def epoch(self) -> str: ...
    @property
    def model_digest(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def has_private_prefixes(self) -> bool: ...
    @property
    def protocol(self) -> int: ...
    @property
    def stream_key_id(self) -> str: ...
    @property
    def abilities(self) -> frozenset[str]: ...
    @property
    def start(self) -> StartTimes | None: ...


class Link(Protocol):
    """The token stream to one replica. No method waits; after a loss they do nothing."""

    def submit(self, submit: Submit) -> None: ...
    def abort(self, sid: int) -> None: ...
    def announce(self) -> None: ...
    def load_adapter(self, digest: str, tenant: str = "") -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class Sink(Protocol):
    """Takes what comes of a live sequence."""

    @property
    def spending(self) -> Spending:
        """What the sequence costs; whoever has its deltas writes it."""

    def push(self, delta: Delta) -> None:
        """The next delta; after one with a `finish` there is no more."""

    def lose(self, *, is_planned: bool) -> None:
        """The link is gone; no more deltas. is_planned: the replica was leaving, so nobody's request is to blame."""


def _ignore_time(_pool: str, _epoch: str, _accounts: TimeAccounts) -> None:
    """Do nothing, for those who count no cost."""


class PoolCallbacks(NamedTuple):
    """Called with the pool's name when something happens there that others wait for or count."""

    on_room: Callable[[str, str], None]
    """A sequence ended or a newer load came at the replica whose id is the second argument: a waiting request may
    fit."""
    on_gap: Callable[[str], None]
    """Block events were missed; a snapshot has been requested."""
    on_drafts: Callable[[str, int, int], None]
    """Draft tokens were verified, and how many of them accepted, since the last load."""
    on_compiled: Callable[[str, int], None]
    """Kernels were compiled behind readiness since the last load."""
    on_adapters: Callable[[str, Sequence[int]], None]
    """What became of adapters since the last load: numbers as of `Load.adapter_totals`."""
    on_time: Callable[[str, str, TimeAccounts], None] = _ignore_time
    """Where the time of a replica has gone until now; the second argument is its epoch."""


def make_pool_callbacks(
    metrics: Metrics,
    pools: Iterable[str],
    on_room: Callable[[str, str], None],
    on_time: Callable[[str, str, TimeAccounts], None] = _ignore_time,
) -> PoolCallbacks:
    """Callbacks that count gaps, drafts, compiled kernels and what becomes of adapters in the metrics. pools: by name;
    the compiled kernels of each are told from the beginning, at 0, so that the first one is an increase."""
    for name in pools:
        metrics.compiled_kernels.labels(name)

    def count_gap(pool: str) -> None:
        metrics.index_gaps.labels(pool).inc()

    def count_drafts(pool: str, num_drafted: int, num_accepted: int) -> None:
        metrics.draft_tokens.labels(pool).inc(num_drafted)
        metrics.accepted_draft_tokens.labels(pool).inc(num_accepted)

    def count_compiled(pool: str, num_compiled: int) -> None:
        metrics.compiled_kernels.labels(pool).inc(num_compiled)

    def count_adapters(pool: str, numbers: Sequence[int]) -> None:
        hits, waits, loads, evictions = numbers[:4]
        metrics.adapter_uses.labels(pool, "hit").inc(hits)
        metrics.adapter_uses.labels(pool, "wait").inc(waits)
        metrics.adapter_loads.labels(pool).inc(loads)
        metrics.adapter_evictions.labels(pool).inc(evictions)

    return PoolCallbacks(on_room, count_gap, count_drafts, count_compiled, count_adapters, on_time)


class _UnreportedSubmit(NamedTuple):
    """A sequence that was sent, and that no load report has counted yet."""

    sid: int
    prefill_tokens: int
    reports_before: int
    """Load reports that had come when it was sent."""


class ReplicaClient:
    """One replica, listed or retiring.

    `on_frame` runs for each frame of its link: what it does per delta is the router's cost per token.
    """

    def __init__(self, member: Member, index: BlockFeed, callbacks: PoolCallbacks, traffic: PoolTraffic) -> None:
        """traffic: the pool's, counted by the clients of all its replicas."""
        self.member = member
        self.hit_tokens = 0
        """Tokens sent there that were expected in its cache."""
        self._traffic = traffic
        self.load: Load | None = None
        self.chain_kind = ChainKind(member.model_digest, member.block_size, member.has_private_prefixes)
        self._index = index
        self._callbacks = callbacks
        self._link: Link | None = None
        self._live: dict[int, Sink] = {}
        self._leaving: dict[int, Spending] = {}
        """What aborted sequences cost whose end the replica has still to tell, by sid."""
        self._adapter_waits = AdapterWaits()
        self._changed: set[ReplicaClient] = set()
        """Takes this client whenever what the policy sees of it changes."""
        self._last_sid = 0
        self._unreported: list[_UnreportedSubmit] = []
        self._num_ended = 0
        """Sequences of the latest load that are over."""
        self.num_reports = 0
        self._drafts = (0, 0)
        """Verified and accepted, as of the last load."""
        self._num_compiled = 0
        """Kernels compiled, as of the last load."""
        self._adapter_totals: tuple[int, ...] = ()
        """`Load.adapter_totals`, as of the last load."""
        self._adapter_counts: dict[tuple[str, str], AdapterCount] = {}
        self._is_open = False
        self._is_syncing = False
        """A snapshot has been requested; what comes before it may be out of order."""
        self._event_seq: int | None = None
        """Number of the last block events in the index; None: events are missing."""
        self.is_retiring = False
        """The replica is listed no more, and nothing is submitted to it."""
        self._on_idle: Callable[[], None] | None = None
        """Called when nothing of a retiring replica is live here."""
        self.ended = asyncio.Event()
        """The stream is over, or of no more use: it is not to the member that was listed, or that one has retired."""

    @property
    def is_ready(self) -> bool:
        return self._link is not None and self.load is not None and not self.is_retiring

    @property
    def is_linked(self) -> bool:
        return self._link is not None

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    def retire(self, on_idle: Callable[[], None]) -> None:
        """Note that the replica is listed no more; only while it is linked. Its stream stays open for what it still
        tells: the rest of its sequences, and how long it drained. on_idle: called whenever nothing of it is live."""
        self.is_retiring = True
        self._on_idle = on_idle
        self._tell_idle()

    def unretire(self) -> None:
        """Note that the replica is listed, maybe again: the stream that it has is used on."""
        if self.is_retiring:
            self.is_retiring, self._on_idle = False, None
            self._changed.add(self)
            self._callbacks.on_room(self.member.pool, self.member.replica_id)

    def leave(self) -> None:
        """Let the stream end if the replica is retiring and has nothing live here."""
        if self.is_retiring and not self._live:
            self.ended.set()

    def _tell_idle(self) -> None:
        if self._on_idle is not None and not self._live:
            self._on_idle()

    @property
    def adapter_counts(self) -> Mapping[tuple[str, str], AdapterCount]:
        """What has become of adapters there, by digest and tenant."""
        return self._adapter_counts

    @property
    def has_adapter_waits(self) -> bool:
        """Whether sequences wait there for adapters, as far as this router knows."""
        return bool(self._adapter_waits)

    def has_adapter_room(self, tenant: str) -> bool:
        """Whether one more request of a tenant may wait there for its adapter; only while it is ready."""
        assert self.load is not None
        return self._adapter_waits.has_room(tenant, self.load.max_inflight)

    def tell_changes_to(self, changed: set["ReplicaClient"]) -> None:
        """Let `changed` have this client whenever what the policy sees of it changes; it replaces the one before."""
        self._changed = changed

    def view(self, cached_tokens: int, adapter: str | None = None, tenant: str = "") -> ReplicaView:
        """The replica as the policy compares it; only while it is ready. adapter: digest of the one that the request
        needs. tenant: whose request it is."""
        assert self.load is not None
        is_lacking = self._is_lacking(adapter)
        unreported = UnreportedWork(
            len(self._unreported), sum(item.prefill_tokens for item in self._unreported), self._num_ended
        )
        return ReplicaView(
            self.member.replica_id,
            self.member.pool,
            self.load,
            unreported,
            len(self._live),
            self.chain_kind.block_size,
            self.member.max_model_len,
            cached_tokens,
            ADAPTER_LOAD_S if is_lacking else 0.0,
            is_lacking and not self.has_adapter_room(tenant),
        )

    def _is_lacking(self, adapter: str | None) -> bool:
        """Whether a request has to wait there for its adapter."""
        return adapter is not None and self.load is not None and adapter not in self.load.resident_adapters

    def load_adapter(self, digest: str, tenant: str = "") -> None:
        """Request that the replica loads an adapter if it has a free slot. A later load report shows whether it did.
        tenant: whose request is about to come; empty: none is known of."""
        if self._link is not None:
            self._link.load_adapter(digest, tenant)

    def drop_adapter(self, digest: str) -> None:
        if self._link is not None:
            self._link.drop_adapter(digest)

    def open(self) -> None:
        """Prepare for a new stream; the numbers of sequences (`sid`) start again."""
        self._is_open = True
        self._last_sid = 0
        self.ended.clear()

    def attach(self, link: Link, seed: BlockEvents | None = None) -> None:
        """Begin to use a stream that has been opened. seed: a copy of what the replica holds; without one the replica
        sends a snapshot."""
        if not self._is_open:
            return
        self._link = link
        self._changed.add(self)
        if seed is None:
            self._request_snapshot()
        else:
            self._apply(seed)
        self._callbacks.on_room(self.member.pool, self.member.replica_id)  # its load may have come already

    def detach(self) -> None:
        """End the use of the stream, which is lost or no longer wanted. What still comes is ignored, and every live
        sequence is lost. Safe to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        is_planned = self.is_retiring or (self.load is not None and self.load.is_draining)
        self._link, self.load, self._event_seq = None, None, None
        self._changed.add(self)
        self._is_syncing = False
        self._unreported.clear()
        self._adapter_waits.clear()
        self._num_ended = 0
        self._index.remove(self.member.replica_id)
        live, self._live = self._live, {}
        leaving, self._leaving = self._leaving, {}
        for spending in leaving.values():
            spending.settle()
        self._traffic.num_ended += len(live)
        for sink in live.values():
            sink.lose(is_planned=is_planned)

    def submit(self, submit: Submit, uncached_tokens: int, sink: Sink) -> int:
        """Send a sequence (whose sid is set here) and return its sid."""
        assert self._link is not None
        self._last_sid = sid = self._last_sid + 1
        self._live[sid] = sink
        if self._is_lacking(submit.adapter):
            self._adapter_waits.begin(sid, submit.tenant)
        self._changed.add(self)
        self._unreported.append(_UnreportedSubmit(sid, uncached_tokens, self.num_reports))
        cached_tokens = len(submit.packed_token_ids) // 4 - uncached_tokens
        self._traffic.begin(submit.service_class, uncached_tokens, cached_tokens)
        self.hit_tokens += cached_tokens
        self._link.submit(msgspec.structs.replace(submit, sid=sid))
        return sid

    def abort(self, sid: int) -> None:
        """Drop a sequence; its sink gets no more. Unknown sids are ignored."""
        sink = self._live.pop(sid, None)
        if sink is not None and self._link is not None:
            self._leaving[sid] = sink.spending
            self._link.abort(sid)
            self._end(sid)
            self._callbacks.on_room(self.member.pool, self.member.replica_id)

    def on_lost(self) -> None:
        """The stream has ended by itself."""
        self.detach()
        self.ended.set()

    def on_frame(self, frame: DownFrame) -> None:
        if not self._is_open:
            return
        live = self._live
        has_room = False
        has_waits = bool(self._adapter_waits)
        num_tokens = 0
        for delta in frame.deltas:
            sink = live.get(delta.sid)
            if sink is None:
                self._take_late(delta)
                continue
            num_tokens += len(delta.token_ids)
            if has_waits:
                self._adapter_waits.end(delta.sid)
                self._changed.add(self)
                has_room = True
            if delta.finish is not None:
                del live[delta.sid]
                self._end(delta.sid)
                has_room = True
            sink.push(delta)
        self._traffic.output_tokens += num_tokens
        if frame.events:
            for events in frame.events:
                self._apply(events)
        if frame.load is not None:
            self._take_load(frame.load)
            has_room = True
        if has_room:
            self._callbacks.on_room(self.member.pool, self.member.replica_id)

    def _take_late(self, delta: Delta) -> None:
        """Take what an aborted sequence has cost in the end."""
        spending = self._leaving.get(delta.sid)
        if spending is not None:
            spending.take(delta)
            if spending.is_settled:
                del self._leaving[delta.sid]

    def _take_load(self, load: Load) -> None:
        """Take a load; what it holds already is no longer counted as sent.

        A report that names no sid was made at most one report before: what was sent before the previous one has arrived
        by now.
        """
        if load.epoch != self.member.epoch:  # another process has the address now
            self.on_lost()
            return
        if self._unreported:
            if load.last_sid:
                self._unreported = [item for item in self._unreported if item.sid > load.last_sid]
            else:
                self._unreported = [item for item in self._unreported if item.reports_before >= self.num_reports]
        self._num_ended = 0
        self.num_reports += 1
        self.load = load
        self._changed.add(self)
        if load.accounts is not None:
            self._callbacks.on_time(self.member.pool, load.epoch, load.accounts)
        if load.num_drafted != self._drafts[0]:
            drafts = load.num_drafted, load.num_accepted
            self._callbacks.on_drafts(self.member.pool, drafts[0] - self._drafts[0], drafts[1] - self._drafts[1])
            self._drafts = drafts
        if load.num_compiled != self._num_compiled:
            self._callbacks.on_compiled(self.member.pool, load.num_compiled - self._num_compiled)
            self._num_compiled = load.num_compiled
        if load.adapter_totals != self._adapter_totals:
            self._take_adapter_counts(load)
        if self._event_seq is not None and load.event_seq > self._event_seq:
            self._index.remove(self.member.replica_id)  # what is there is of before the events that are missing
            self._recover_events()

    def _take_adapter_counts(self, load: Load) -> None:
        before = self._adapter_totals or (0,) * len(load.adapter_totals)
        gained = [new - old for new, old in zip(load.adapter_totals, before, strict=True)]
        self._callbacks.on_adapters(self.member.pool, gained)
        self._adapter_totals = load.adapter_totals
        for count in load.adapter_counts:
            self._adapter_counts.pop((count.digest, count.tenant), None)
            self._adapter_counts[count.digest, count.tenant] = count
        while len(self._adapter_counts) > MAX_ADAPTER_COUNTS:  # the replica itself remembers no more
            self._adapter_counts.pop(next(iter(self._adapter_counts)))

    def _end(self, sid: int) -> None:
        """Count a sequence that has ended. The latest load report counts it as live, unless it was sent after that
        report."""
        self._traffic.num_ended += 1
        self._adapter_waits.end(sid)
        self._changed.add(self)
        self._tell_idle()
        for place, item in enumerate(self._unreported):
            if item.sid == sid:
                del self._unreported[place]
                return
        self._num_ended += 1

    def _apply(self, events: BlockEvents) -> None:
        applied = self._index.apply(self.member.replica_id, self.member.epoch, events)
        if applied is ApplyResult.OK:
            self._event_seq = events.event_seq
            self._is_syncing = self._is_syncing and not events.is_snapshot
        elif applied is ApplyResult.GAP and self._recover_events():
            self._callbacks.on_gap(self.member.pool)

    def _recover_events(self) -> bool:
        """Request a snapshot from the replica, because block events are missing. Returns False if one is requested
        already, or if there is no link."""
        self._event_seq = None
        if self._link is None or self._is_syncing:
            return False
        self._request_snapshot()
        return True

    def _request_snapshot(self) -> None:
        assert self._link is not None
        self._is_syncing = True
        self._link.announce()
