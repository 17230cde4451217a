"""One replica as this router sees it: its link, its latest load, what was sent since, and this router's live sequences
there.

Not a connection (that is the link's affair) and not a choice (policy). Invariants: a live sequence gets each of its
deltas once, in order, and after its last one, or after `lose`, nothing more; a remote that has no link or load, or
retires, is not ready, and nothing is submitted to it.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.metrics import Metrics
from penstock.prefix.index import Applied, PrefixIndex
from penstock.router.replicas.traffic import Flow
from penstock.router.routing.chains import ChainKind
from penstock.router.routing.policy import ReplicaView, Since
from penstock.wire.frames import BlockEvents, Delta, DownFrame, Load, Submit

ADAPTER_LOAD_S = 0.2
"""What a request is taken to wait for where its adapter has to be loaded first; measured: 0.05 s to 0.5 s."""


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


class Link(Protocol):
    """The token stream to one replica. No method waits; after a loss they do nothing."""

    def submit(self, submit: Submit) -> None: ...
    def abort(self, sid: int) -> None: ...
    def announce(self) -> None: ...
    def load_adapter(self, digest: str) -> None: ...
    def drop_adapter(self, digest: str) -> None: ...


class Sink(Protocol):
    """Who reads a live sequence."""

    def push(self, delta: Delta) -> None:
        """The next delta; after one with a `finish` there is no more."""

    def lose(self) -> None:
        """The link is gone; no more deltas."""


class Hooks(NamedTuple):
    """What happens to a pool, for whoever waits or counts."""

    on_room: Callable[[str], None]
    """A sequence ended or a newer load came: a waiting request may fit."""
    on_gap: Callable[[str], None]
    """Block events were missed; a snapshot has been asked for."""
    on_drafts: Callable[[str, int, int], None]
    """Draft tokens were verified, and how many of them accepted, since the last load."""


def counted(metrics: Metrics, on_room: Callable[[str], None]) -> Hooks:
    """What is told of gaps and drafts goes into the metrics."""

    def count_gap(pool: str) -> None:
        metrics.index_gaps.labels(pool).inc()

    def count_drafts(pool: str, num_drafted: int, num_accepted: int) -> None:
        metrics.draft_tokens.labels(pool).inc(num_drafted)
        metrics.accepted_draft_tokens.labels(pool).inc(num_accepted)

    return Hooks(on_room, count_gap, count_drafts)


class _Sent(NamedTuple):
    sid: int
    prefill_tokens: int
    report: int
    """How many loads had come when it was sent."""


class ReplicaClient:
    """A replica, listed or retiring. `on_frame` runs for each frame of its link: what it does per delta is the router's
    cost per token."""

    def __init__(self, member: Member, index: PrefixIndex, hooks: Hooks, flow: Flow) -> None:
        """flow: what goes to the pool, counted by all its remotes."""
        self.member = member
        self.hit_tokens = 0
        """That were sent there expecting them in its cache."""
        self._flow = flow
        self.load: Load | None = None
        self.chain_kind = ChainKind(member.model_digest, member.block_size)
        self._index = index
        self._hooks = hooks
        self._link: Link | None = None
        self._live: dict[int, Sink] = {}
        self._last_sid = 0
        self._sent: list[_Sent] = []
        self._num_ended = 0
        """Sequences of the latest load that are over."""
        self.num_reports = 0
        self._drafts = (0, 0)
        """Verified and accepted, as of the last load."""
        self._is_open = False
        self._is_syncing = False
        """A snapshot has been asked for; what comes before it may be out of order."""
        self._event_seq: int | None = None
        """Of the last block events in the index."""
        self.is_retiring = False
        """It is listed no more: the stream ends with the last live sequence. Set by the fleet while there is one."""
        self.ended = asyncio.Event()
        """The stream is over, or of no more use: it is not to the member that was listed, or that one has retired."""

    @property
    def is_ready(self) -> bool:
        return self._link is not None and self.load is not None and not self.is_retiring

    @property
    def num_inflight(self) -> int:
        return len(self._live)

    def view(self, cached_tokens: int, adapter: str | None = None) -> ReplicaView:
        """For the policy; only of a ready remote. adapter: digest of the one that the request needs."""
        assert self.load is not None
        is_lacking = adapter is not None and adapter not in self.load.resident_adapters
        since = Since(len(self._sent), sum(item.prefill_tokens for item in self._sent), self._num_ended)
        return ReplicaView(
            self.member.replica_id,
            self.member.pool,
            self.load,
            since,
            len(self._live),
            self.chain_kind.block_size,
            self.member.max_model_len,
            cached_tokens,
            ADAPTER_LOAD_S if is_lacking else 0.0,
        )

    def load_adapter(self, digest: str) -> None:
        """If there is room; load reports tell."""
        if self._link is not None:
            self._link.load_adapter(digest)

    def drop_adapter(self, digest: str) -> None:
        if self._link is not None:
            self._link.drop_adapter(digest)

    def open(self) -> None:
        """A stream is about to begin: sids start again."""
        self._is_open = True
        self._last_sid = 0
        self.ended.clear()

    def attach(self, link: Link, seed: BlockEvents | None = None) -> None:
        """The stream is there. seed: a copy of what the replica holds; without one it is asked."""
        if not self._is_open:
            return
        self._link = link
        if seed is None:
            self._sync()
        else:
            self._apply(seed)
        self._hooks.on_room(self.member.pool)  # its load may have come already

    def detach(self) -> None:
        """The stream is gone, or no longer wanted: what still comes is ignored, and every live sequence is told. Safe
        to call twice."""
        if not self._is_open:
            return
        self._is_open = False
        self._link, self.load, self._event_seq = None, None, None
        self._is_syncing = False
        self._sent.clear()
        self._num_ended = 0
        self._index.remove(self.member.replica_id)
        live, self._live = self._live, {}
        self._flow.num_ended += len(live)
        for sink in live.values():
            sink.lose()

    def submit(self, submit: Submit, uncached_tokens: int, sink: Sink) -> int:
        """Send a sequence (whose sid is set here) and return its sid."""
        assert self._link is not None
        self._last_sid = sid = self._last_sid + 1
        self._live[sid] = sink
        self._sent.append(_Sent(sid, uncached_tokens, self.num_reports))
        self._count(uncached_tokens, len(submit.packed_token_ids) // 4)
        self._link.submit(msgspec.structs.replace(submit, sid=sid))
        return sid

    def _count(self, uncached_tokens: int, num_tokens: int) -> None:
        flow, cached_tokens = self._flow, num_tokens - uncached_tokens
        flow.num_started += 1
        flow.prefill_tokens += uncached_tokens
        flow.cached_tokens += cached_tokens
        self.hit_tokens += cached_tokens

    def abort(self, sid: int) -> None:
        """Drop a sequence; its sink hears no more. Unknown sids are ignored."""
        if self._live.pop(sid, None) is not None and self._link is not None:
            self._link.abort(sid)
            self._end(sid)
            self._hooks.on_room(self.member.pool)

    def on_lost(self) -> None:
        """The stream has ended by itself."""
        self.detach()
        self.ended.set()

    def on_frame(self, frame: DownFrame) -> None:
        if not self._is_open:
            return
        live = self._live
        has_room = False
        for delta in frame.deltas:
            sink = live.get(delta.sid)
            if sink is None:
                continue
            self._flow.output_tokens += len(delta.token_ids)
            if delta.finish is not None:
                del live[delta.sid]
                self._end(delta.sid)
                has_room = True
            sink.push(delta)
        if frame.events:
            for events in frame.events:
                self._apply(events)
        if frame.load is not None:
            self._report(frame.load)
            has_room = True
        if has_room:
            self._hooks.on_room(self.member.pool)

    def _report(self, load: Load) -> None:
        """Take a load; what it holds already is no longer counted as sent.

        A report that names no sid was made at most one report before: what was sent before the previous one has arrived
        by now.
        """
        if load.epoch != self.member.epoch:  # another process has the address now
            self.on_lost()
            return
        if self._sent:
            if load.last_sid:
                self._sent = [item for item in self._sent if item.sid > load.last_sid]
            else:
                self._sent = [item for item in self._sent if item.report >= self.num_reports]
        self._num_ended = 0
        self.num_reports += 1
        self.load = load
        if load.num_drafted != self._drafts[0]:
            drafts = load.num_drafted, load.num_accepted
            self._hooks.on_drafts(self.member.pool, drafts[0] - self._drafts[0], drafts[1] - self._drafts[1])
            self._drafts = drafts
        if self._event_seq is not None and load.event_seq > self._event_seq:
            self._index.remove(self.member.replica_id)  # what is there is of before the events that are missing
            self._miss()

    def _end(self, sid: int) -> None:
        """A sequence is over: the latest load holds it, unless it was sent since."""
        self._flow.num_ended += 1
        if self.is_retiring and not self._live:
            self.ended.set()
        for place, item in enumerate(self._sent):
            if item.sid == sid:
                del self._sent[place]
                return
        self._num_ended += 1

    def _apply(self, events: BlockEvents) -> None:
        applied = self._index.apply(self.member.replica_id, self.member.epoch, events)
        if applied is Applied.OK:
            self._event_seq = events.event_seq
            self._is_syncing = self._is_syncing and not events.is_snapshot
        elif applied is Applied.GAP and self._miss():
            self._hooks.on_gap(self.member.pool)

    def _miss(self) -> bool:
        """Events are missing; whether that is news."""
        self._event_seq = None
        if self._link is None or self._is_syncing:
            return False
        self._sync()
        return True

    def _sync(self) -> None:
        assert self._link is not None
        self._is_syncing = True
        self._link.announce()
