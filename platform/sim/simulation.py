"""A load against a simulated platform, event by event, on a clock of its own.

Events are arrivals, ends of patience, hang-ups, starts of replicas, reports and turns of the autoscaler; the steps of
replicas are caught up with before each of them, and one by one while somebody waits for what they bring (a queue, a
session's next turn). Invariants: time never runs back; the same load, settings and seeds give the same records; each
request is over exactly once.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Protocol

from penstock.autoscale.journal import Journal
from penstock.autoscale.scaler import Actuator, ScaledPool, Scaler, Source
from penstock.router.config import GatewayConfig
from penstock.router.models.request_targets import agreed_targets
from penstock.router.replicas.replica_client import PoolCallbacks
from penstock.router.replicas.routing_policy import RoutingPolicy, production
from penstock.router.routing.native_search import open_search
from penstock.router.routing.tiers import TierRule, in_order
from penstock.sim.config import SimulatedPool, SimulationConfig
from penstock.sim.content import Segment, read_segments
from penstock.sim.faults.autoscaler import SimulatedAutoscaler
from penstock.sim.faults.reports import SimulatedReports
from penstock.sim.faults.services import FaultyActuator, RecordsInMemory, wall_clock
from penstock.sim.fleet import SimulatedFleet
from penstock.sim.replica import SimulatedReplica
from penstock.sim.request import SimulatedRequest
from penstock.sim.simulated_gateway import SimulatedGateway, SimulatedRoute
from penstock.tenancy.share import DEFAULT_SHARE, Share
from penstock.wire.errors import ContextTooLong
from penstock.wire.scaling import GatewayReport, PoolReport, ReplicaReport
from penstock.wire.targets import NO_TARGETS
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.series import Observed

TURN_S = 1.0
"""Seconds between two turns of the autoscaler."""
REPORT_LEAD_S = 0.25
"""Seconds between a gateway's report and the turn that reads it: half of those between two reports, on the average."""


class Turns(Protocol):
    """What has a turn a second and changes the number of replicas."""

    async def reconcile(self) -> None: ...


class MakeTurns(Protocol):
    """Makes it from its name, the scaled pools, the gateways' reports, the replicas, a journal and two clocks; see
    `Scaler`."""

    def __call__(
        self,
        name: str,
        pools: Sequence[ScaledPool],
        source: Source,
        actuator: Actuator,
        journal: Journal,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        /,
    ) -> Turns: ...


class Simulation:
    """One run. pools: at least one. on_over: called with each request when it is over. on_observed: called when the
    number of ready replicas changes. journal: takes the autoscaler's decisions. make_scaler: another autoscaler than
    production's, for comparisons; None: production's."""

    def __init__(
        self,
        pools: Sequence[SimulatedPool],
        gateway: GatewayConfig,
        config: SimulationConfig,
        on_over: Callable[[SimulatedRequest], None],
        on_observed: Callable[[Observed], None],
        journal: Journal,
        *,
        has_tenants: bool = False,
        make_scaler: MakeTurns | None = None,
        routing: RoutingPolicy | None = None,
    ) -> None:
        """has_tenants: whether the load is of several tenants. routing: chooses replicas; None: the gateway's own
        policy."""
        self.now = 0.0
        self._on_over = on_over
        self._on_observed = on_observed
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_live = 0
        self._num_followed = 0
        """Live requests whose sessions go on."""
        self._arrivals: Iterator[Planned] = iter(())
        self._is_arriving = False
        self._number = itertools.count()
        self._histories: dict[str, list[Segment]] = {}
        self._parked: dict[str, list[Planned]] = {}
        self._timeout_s = 0.0
        self._num_reports = 0
        self._shares = {tenant: Share(service_class=name) for tenant, name in config.classes.items()}
        rule = TierRule(config.tier_policy)
        routes = _make_routes(pools, rule)
        random = Random(f"ties {config.seed}")
        choose = routing or production(random, open_search())
        targets = agreed_targets([pool.targets for pool in pools], NO_TARGETS)
        self.gateway = SimulatedGateway(
            gateway, routes, random, choose, self._clock, self._end, targets, by_cost=rule.goes_by_cost
        )
        self.gateway.send = self._send
        by_pool = {pool.name: (pool, next(route for route in routes if pool.name in route.pools)) for pool in pools}
        callbacks = PoolCallbacks(self._wake, _ignore, _ignore, _ignore, _ignore)
        self.fleet = SimulatedFleet(
            by_pool,
            config,
            self.gateway.index,
            callbacks,
            self._clock,
            self.after,
            self._observe,
            has_tenants=has_tenants,
        )
        scaled = [
            ScaledPool(pool.name, pool.name, pool.engine.max_num_seqs, pool.autoscale, targets=pool.targets)
            for pool in pools
            if pool.autoscale is not None
        ]
        self._scaled = [pool.name for pool in scaled]
        faults = config.faults
        self._reports = SimulatedReports(config.gateways, faults, self._clock)
        self._actuator = FaultyActuator(self.fleet, faults, self._clock)
        make = make_scaler or partial(Scaler, records=RecordsInMemory(), shortages=self.fleet.shortages)
        self._autoscaler = SimulatedAutoscaler(
            lambda source: (
                make(
                    "simulated", scaled, source, self._actuator, journal, self._clock, wall_clock(faults, self._clock)
                ).reconcile
            ),
            self._reports,
            self._actuator,
            faults,
        )

    def run(self, plan: Iterator[Planned], timeout_s: float, drain_s: float) -> None:
        """Play the plan to its end. timeout_s: longest time of a request. drain_s: longest time for answers behind the
        last arrival; what is then left is over, unfinished."""
        self._arrivals, self._is_arriving, self._timeout_s = plan, True, timeout_s
        self.fleet.begin()
        self._arrive_next()
        if self._scaled:
            self.after(TURN_S - REPORT_LEAD_S, self._take_report)
        cut_s = float("inf")
        while self._is_arriving or self._num_live or self._num_followed:
            if not self._is_arriving and cut_s == float("inf"):
                cut_s = self.now + drain_s
            if not self._step(cut_s):
                break
        self._cut()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call an action so many seconds from now."""
        self._at(self.now + delay_s, action)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), action))

    def _clock(self) -> float:
        return self.now

    def _step(self, cut_s: float) -> bool:
        """Let the next thing happen. Returns False if it would be behind `cut_s`."""
        at_s = self._events[0][0] if self._events else float("inf")
        if len(self.gateway.order) or self._num_followed or not self._is_arriving:
            replica = min(self.fleet.replicas, key=_next_end_s, default=None)
            if replica is not None and replica.engine.end_s <= min(at_s, cut_s):
                self.now = replica.engine.end_s
                replica.deliver(self.now)
                return True
        if at_s > cut_s or not self._events:
            self.now = min(cut_s, at_s)
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def _wake(self, pool: str, changed: str | None = None) -> None:
        while self.gateway.order.wake(pool, changed):
            pass  # decisions take no time here

    def _catch_up(self) -> None:
        for replica in list(self.fleet.replicas):
            if replica.engine.end_s <= self.now or replica.batch.noted is not None:
                replica.deliver(self.now)

    # requests

    def _arrive_next(self) -> None:
        """Note the next arrival of the plan. Later turns of sessions are kept for the end of the turn before."""
        for planned in self._arrivals:
            if planned.turn:
                assert planned.session is not None
                self._parked.setdefault(planned.session, []).append(planned)
                continue
            self._at(max(self.now, planned.at_s), partial(self._arrive_planned, planned))
            return
        self._is_arriving = False

    def _arrive_planned(self, planned: Planned) -> None:
        self._arrive_next()
        if planned.session is not None and not planned.is_last_turn:
            self._num_followed += 1
        self._arrive(planned, planned.at_s, read_segments(planned))

    def _arrive(self, planned: Planned, at_s: float, segments: list[Segment]) -> None:
        self._catch_up()
        share = self._shares.get(planned.tenant, DEFAULT_SHARE)
        request = SimulatedRequest(planned, at_s, segments, next(self._number), self._timeout_s, share)
        request.on_end = self._on_end
        self._num_live += 1
        self.gateway.arrive(request)
        if request.is_over:
            return
        if self.gateway.is_waiting(request):
            self.after(self.gateway.patience_s(request), lambda: self.gateway.expire(request))
        if planned.cancel_after_s is not None:
            self.after(planned.cancel_after_s, lambda: self._hang_up(request))
        self.after(self._timeout_s, lambda: self._time_out(request))

    def _send(self, replica_id: str, request: SimulatedRequest, sid: int) -> None:
        replica = self.fleet.replica(replica_id)
        replica.submit(request, sid, request.keys(replica.client.chain_kind.block_size), self.now)

    def _on_end(self, request: SimulatedRequest) -> None:
        """A replica has ended a request's sequence."""
        seq = request.seq
        assert seq is not None
        assert request.replica is not None
        self.fleet.replica(request.replica).take_ended(request)
        self.gateway.note_end(request, is_finished=not seq.is_refused)
        if seq.is_refused:
            request.error = ContextTooLong(f"{seq.num_tokens} tokens leave no room for an answer in the KV cache")
        request.is_finished = not seq.is_refused
        request.end_s = seq.token_times_s[-1] if seq.token_times_s else self.now
        replica_id = request.replica
        self._end(request)
        self.fleet.drop_if_empty(replica_id, request.end_s)

    def _end(self, request: SimulatedRequest) -> None:
        """A request is over, whatever became of it."""
        assert not request.is_over, "a request is over once"
        request.is_over = True
        self._num_live -= 1
        if request.end_s is None:
            request.end_s = self.now
        self._on_over(request)
        session = request.planned.session
        if session is None:
            return
        turns = self._parked.get(session, [])
        if turns and request.is_finished:
            following = turns.pop(0)
            history = [*request.segments, request.answer, *read_segments(following)]
            due_s = request.end_s + following.think_s
            self._at(max(self.now, due_s), lambda: self._arrive(following, due_s, history))
            return
        if not request.planned.is_last_turn or request.planned.turn:
            self._num_followed -= 1
        self._parked.pop(session, None)

    def _hang_up(self, request: SimulatedRequest) -> None:
        if not request.is_over:
            self._catch_up()
        if not request.is_over:
            request.is_cancelled = True
            self._abandon(request)

    def _time_out(self, request: SimulatedRequest) -> None:
        if not request.is_over:
            self._catch_up()
        if not request.is_over:
            self._abandon(request)

    def _abandon(self, request: SimulatedRequest) -> None:
        """End a request that has no end of its own."""
        self.gateway.cancel(request)
        if request.replica is not None:
            replica = self.fleet.replica(request.replica)
            replica.abort(request, self.now)
            self.gateway.charges.end(request.arrival)
            replica_id = request.replica
            self._end(request)
            self.fleet.drop_if_empty(replica_id, self.now)
        else:
            self._end(request)

    def _cut(self) -> None:
        """End what is left."""
        self._catch_up()
        for replica in list(self.fleet.replicas):
            for request in replica.live_requests:
                self._abandon(request)
        for request in self.gateway.waiting:
            self._abandon(request)

    # the autoscaler

    def _take_report(self) -> None:
        """The gateway's report that the next turn reads."""
        self._catch_up()
        self.gateway.charges.correct()
        order = self.gateway.order
        self._num_reports += 1
        report = GatewayReport(
            "gateway",
            self._num_reports,
            [
                PoolReport(
                    name, self.fleet.count_traffic(name).to_wire(), order.num_waiting(name), order.oldest_s(name)
                )
                for name in self._scaled
            ],
            [
                ReplicaReport(
                    client.member.replica_id,
                    name,
                    client.load,
                    client.chain_kind.block_size,
                    self.gateway.index.num_held(client.member.replica_id),
                    client.hit_tokens,
                )
                for name in self._scaled
                for client in self.fleet.ready_clients(name)
                if client.load is not None
            ],
        )
        self._reports.write(report)
        self.after(REPORT_LEAD_S, self._scale)

    def _scale(self) -> None:
        self._catch_up()
        self._autoscaler.take_turn(self.now)
        self.after(TURN_S - REPORT_LEAD_S, self._take_report)

    def _observe(self) -> None:
        self._on_observed(Observed(self.now, {name: float(count) for name, count in self.fleet.num_ready().items()}))


def _make_routes(pools: Sequence[SimulatedPool], rule: TierRule) -> list[SimulatedRoute]:
    """A route for the pools of each tier, in the order of the policy; where that goes by cost, for each pool."""
    if rule.goes_by_cost:
        return in_order(
            [
                SimulatedRoute(pool.tier, (pool.name,), pool.engine.block_size, pool.price_per_hour, pool.paced_classes)
                for pool in pools
            ],
            rule,
        )
    tiers = {pool.tier: [other for other in pools if other.tier == pool.tier] for pool in pools}
    routes = [
        SimulatedRoute(
            tier,
            tuple(pool.name for pool in members),
            members[0].engine.block_size,
            paced_classes={name for pool in members for name in pool.paced_classes},
        )
        for tier, members in tiers.items()
    ]
    return in_order(routes, rule)


def _next_end_s(replica: SimulatedReplica) -> float:
    return replica.engine.end_s


def _ignore(*_: object) -> None:
    """Gaps, drafts and compiled kernels: there are none."""
