"""One simulated gateway: production's queue order, fair shares, prefix mirror, replica clients, tiers and routing
policy around requests without text.

`_try_place` is what `penstock.router.dispatch.dispatcher` does with a request that has begun nowhere yet: the same
objects are asked in the same order. Invariant: a request that came is told once what became of it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from random import Random

from penstock.base.errors import PenstockError
from penstock.prefix.native_index import open_index
from penstock.router.config import GatewayConfig
from penstock.router.dispatch.attempt import AttemptResult
from penstock.router.dispatch.lane import Claim, Lane, Waiter
from penstock.router.dispatch.output_lengths import OutputLengths
from penstock.router.dispatch.overdue import SHARED_PART, SLACK_PART, is_late
from penstock.router.dispatch.route_prices import price_at_replica
from penstock.router.dispatch.shares.charges import Charges, Expected
from penstock.router.dispatch.shares.counters import VirtualCounters
from penstock.router.dispatch.shares.place_shares import PlaceShares
from penstock.router.dispatch.submission import EXPECT_GRACE_S
from penstock.router.dispatch.waiting_order import WaitingOrder
from penstock.router.replicas.pool_table import PoolTable
from penstock.router.replicas.replica_client import ReplicaClient
from penstock.router.replicas.routing_policy import ReadyReplicas, RoutedRequest, RoutingPolicy
from penstock.router.routing.chains import ChainKind
from penstock.router.routing.policy import Decision, Wait
from penstock.router.routing.tiers import OBSTACLE, UNFORCED, RouteForecast, Tier, TierReason, decide
from penstock.sim.request import SimulatedRequest
from penstock.wire.errors import ContextTooLong
from penstock.wire.frames import SamplingParams, Submit
from penstock.wire.targets import NO_TARGETS, ClassTargets

_MADE_ROOM_FOR = (Wait.NO_CREDIT, Wait.NO_BLOCKS)


class SimulatedRoute:
    """The pools of one tier, and the ready replicas in them."""

    def __init__(
        self,
        tier: Tier,
        pools: tuple[str, ...],
        block_size: int,
        price_per_hour: float | None = None,
        paced_classes: Collection[str] = (),
    ) -> None:
        """price_per_hour: of a replica; None: there is none, or the pools have several. paced_classes: classes for
        whose requests batch rows of the replicas yield."""
        self.price_per_hour = price_per_hour
        self.paced_classes = paced_classes
        self.tier = tier
        self.pools = pools
        self.block_size = block_size
        self._clients: dict[str, ReplicaClient] = {}
        self._tables: list[PoolTable] | None = None

    def add(self, client: ReplicaClient) -> None:
        """A replica has become ready."""
        self._clients[client.member.replica_id] = client
        self._tables = None

    def remove(self, client: ReplicaClient) -> None:
        """A replica takes no requests any more."""
        del self._clients[client.member.replica_id]
        self._tables = None

    def client(self, replica_id: str) -> ReplicaClient:
        return self._clients[replica_id]

    @property
    def tables(self) -> list[PoolTable]:
        """Tables of the pools that have replicas."""
        if self._tables is None:
            by_pool = {
                pool: [client for client in self._clients.values() if client.member.pool == pool] for pool in self.pools
            }
            self._tables = [PoolTable(pool, clients) for pool, clients in by_pool.items() if clients]
        return self._tables

    def count_places(self) -> tuple[int, int]:
        """Places for sequences: those that are free now, and all that the gateway has or may have."""
        counts = [table.read().count_places() for table in self.tables]
        return sum(free for free, _ in counts), sum(places for _, places in counts)


class SimulatedGateway:
    """The gateway. routes: in the order of the tenants' tier policy. send: gives a request's sequence to a replica,
    whose id it gets. choose: the routing policy. on_over: called with each request that is over without a replica.
    targets: of the requests, by class; a class that names no ttft_s has the configuration's ttft_target_s."""

    def __init__(
        self,
        config: GatewayConfig,
        routes: Sequence[SimulatedRoute],
        random: Random,
        choose: RoutingPolicy,
        clock: Callable[[], float],
        on_over: Callable[[SimulatedRequest], None],
        targets: ClassTargets = NO_TARGETS,
        *,
        by_cost: bool = False,
    ) -> None:
        """by_cost: whether the tenants' tier policy goes by cost, so that each route is one pool."""
        self._by_cost = by_cost
        self.index = open_index()
        self._targets = targets
        self.routes = routes
        self.send: Callable[[str, SimulatedRequest, int], None]
        self._config = config
        self._choose = choose
        self._clock = clock
        self._on_over = on_over
        self._is_fair = config.fairness == "vtc"
        self._counters = VirtualCounters()
        self.charges = Charges(self._counters)
        self.order = WaitingOrder(
            config.max_queue,
            config.queue_timeout_s,
            self._counters,
            max_share=config.tenant_queue_share,
            clock=clock,
            random=random,
        )
        self._lengths = OutputLengths()
        self._places = PlaceShares(config.reserved_places)
        self._pools = tuple(sorted(pool for route in routes for pool in route.pools))
        self._lane = Lane(self._pools)
        self._waiters: dict[SimulatedRequest, Waiter] = {}

    def arrive(self, request: SimulatedRequest) -> None:
        """Place a request, or let it wait; where that is refused, it is over."""
        account, share = request.account, request.share
        claim = Claim(request.arrival, account, share) if self._is_fair else Claim(request.arrival)
        request.begun_s = self._clock()
        request.is_overdue = False
        request.on_turn = self._on_turn
        self.order.enter(claim.tenant)
        try:
            result = self.order.try_first(self._lane, lambda: self._try_place(request), claim)
            if result is None or not result.ends_wait:
                self._waiters[request] = self.order.begin(
                    self._lane,
                    lambda: self._try_place(request),
                    claim,
                    request,
                    deadline_in_s=request.timeout_s,
                    is_overdue=result is AttemptResult.OVERDUE,
                )
                return
        except PenstockError as error:
            self._refuse(request, error)
        self.order.leave(claim.tenant)

    def expire(self, request: SimulatedRequest) -> None:
        """Refuse a request whose patience in the queue has ended. Those that don't wait are ignored."""
        waiter = self._waiters.get(request)
        if waiter is not None:
            self._leave_queue(request)
            self._refuse(request, self.order.explain_late(waiter, request.timeout_s))

    def cancel(self, request: SimulatedRequest) -> None:
        """Take a request out of the queue. Those that don't wait are ignored."""
        if request in self._waiters:
            self._leave_queue(request)

    @property
    def waiting(self) -> list[SimulatedRequest]:
        return list(self._waiters)

    def is_waiting(self, request: SimulatedRequest) -> bool:
        return request in self._waiters

    def patience_s(self, request: SimulatedRequest) -> float:
        return self.order.patience_s(request.timeout_s)

    def note_end(self, request: SimulatedRequest, *, is_finished: bool) -> None:
        """A replica has ended a request's sequence."""
        self.charges.end(request.arrival)
        if is_finished:
            self._lengths.learn(self._pools, len(request.token_times_s))

    def _on_turn(self, request: SimulatedRequest, error: Exception | None) -> None:
        waiter = self._waiters.pop(request)
        self.order.leave(waiter.claim.tenant)
        if error is not None:
            assert isinstance(error, PenstockError), error
            self._refuse(request, error)

    def _leave_queue(self, request: SimulatedRequest) -> None:
        waiter = self._waiters.pop(request)
        self.order.give_up(waiter)
        self.order.leave(waiter.claim.tenant)

    def _refuse(self, request: SimulatedRequest, error: PenstockError) -> None:
        request.error = error
        self._on_over(request)

    # placing

    def _try_place(self, request: SimulatedRequest) -> AttemptResult:
        """Choose a route and a replica, and submit the request there, without waiting. Raises ContextTooLong where no
        replica's context holds the prompt."""
        forecasts: list[tuple[RouteForecast, Decision]] = []

        def forecast_all() -> Iterator[RouteForecast]:
            for route in self.routes:
                forecasts.append(self._forecast(request, route))
                yield forecasts[-1][0]

        target_s = (SLACK_PART if request.is_overdue else 1.0) * self._target_s(request)
        choice = decide(forecast_all(), target_s, by_cost=self._by_cost)
        if choice.route is None:
            if all(forecast.obstacle is TierReason.CONTEXT_TOO_LONG for forecast, _ in forecasts):
                raise ContextTooLong(f"{request.num_prompt_tokens} tokens leave no room for an answer in any context")
            return AttemptResult.MUST_WAIT
        _, decision = forecasts[choice.route]
        route = self.routes[choice.route]
        if self._must_leave(request, route):
            return AttemptResult.MUST_WAIT
        is_only = len(self.routes) == 1 and choice.reason in UNFORCED
        if self._config.overdue == "last":
            result = self._let_others_first(request, route, decision)
            if result is not None:
                return result
        request.tier, request.tier_reason = route.tier, TierReason.ONLY_TIER if is_only else choice.reason
        self._submit(request, route, decision)
        return AttemptResult.PLACED

    def _forecast(self, request: SimulatedRequest, route: SimulatedRoute) -> tuple[RouteForecast, Decision]:
        size, num_tokens, tables = route.block_size, request.num_prompt_tokens, route.tables
        keys = request.keys(size)
        held = {ChainKind("", size): self.index.lookup(keys, self._clock())} if keys else {}
        queries = [table.query(held, num_tokens, None, request.planned.tenant, None) for table in tables]
        expected, own_keys = self._expect_output(request), keys[: num_tokens // size]
        asked = RoutedRequest(num_tokens, expected, own_keys, size, self._clock())
        is_yielded_to = request.share.service_class in route.paced_classes and self._may_overdraw(request, route)
        decision = self._choose(asked, ReadyReplicas(tables, queries, may_overdraw=is_yielded_to))
        if decision.reason in _MADE_ROOM_FOR and not is_yielded_to and self._may_overdraw(request, route):
            decision = self._choose(asked, ReadyReplicas(tables, queries, may_overdraw=True))
        if decision.replica_id is not None:
            return self._price(request, route, decision), decision
        assert isinstance(decision.reason, Wait)
        return RouteForecast(obstacle=OBSTACLE[decision.reason]), decision

    def _price(self, request: SimulatedRequest, route: SimulatedRoute, decision: Decision) -> RouteForecast:
        # a policy that predicts nothing keeps the first route
        forecast = RouteForecast(decision.predicted_ttft_s or 0.0)
        if not self._by_cost or decision.replica_id is None:
            return forecast
        client, expected = route.client(decision.replica_id), self._expect_output(request)
        tpot_s, cost_nano = price_at_replica(
            client, request.num_prompt_tokens, decision.cached_tokens, expected, route.price_per_hour
        )
        return forecast._replace(cost_nano=cost_nano, tpot_s=tpot_s)

    def _expect_output(self, request: SimulatedRequest) -> float:
        return max(1.0, min(self._lengths.expect(self._pools), request.max_tokens))

    def _must_leave(self, request: SimulatedRequest, route: SimulatedRoute) -> bool:
        """Whether the places that are free are kept for other tenants."""
        if not self._is_fair:
            return False
        tenant = self._ask(request)
        if not self._places.are_kept:
            return False
        return self._places.must_leave(tenant, self.charges.num_live(tenant), *route.count_places())

    def _let_others_first(
        self, request: SimulatedRequest, route: SimulatedRoute, decision: Decision
    ) -> AttemptResult | None:
        """What comes of an attempt that has found a replica where the first token would come too late. Returns None
        where it does not."""
        target_s = self._target_s(request)
        if request.is_overdue:
            return AttemptResult.MUST_WAIT if is_late(decision, 0.0, SLACK_PART * target_s) else None
        tenant, places = request.account, route.count_places() if self._places.are_kept else None
        is_shared = places is not None and self._places.has_share(tenant, self.charges.num_live(tenant), places[1])
        waited_s = self._clock() - request.begun_s
        request.is_overdue = is_late(decision, waited_s, (SHARED_PART if is_shared else 1.0) * target_s)
        return AttemptResult.OVERDUE if request.is_overdue else None

    def _may_overdraw(self, request: SimulatedRequest, route: SimulatedRoute) -> bool:
        """Whether the request may be placed where no place is free."""
        if not self._is_fair:
            return False
        tenant = self._ask(request)
        return self._places.is_below(tenant, self.charges.num_live(tenant), route.count_places()[1])

    def _target_s(self, request: SimulatedRequest) -> float:
        target_s = self._targets.of(request.share.service_class).ttft_s
        return self._config.ttft_target_s if target_s is None else target_s

    def _ask(self, request: SimulatedRequest) -> str:
        self._places.ask(request.account, request.share.rate, self._clock())
        return request.account

    def _submit(self, request: SimulatedRequest, route: SimulatedRoute, decision: Decision) -> None:
        assert decision.replica_id is not None
        client = route.client(decision.replica_id)
        replica_id, now = decision.replica_id, self._clock()
        request.replica, request.predicted_ttft_s = replica_id, decision.predicted_ttft_s
        request.sent_s = now
        sid = client.submit(_make_submit(request), request.num_prompt_tokens - decision.cached_tokens, request)
        request.sid, request.client = sid, client
        keys = request.keys(route.block_size)
        if keys:
            lifetime_s = 2 * (decision.predicted_ttft_s or 0.0) + EXPECT_GRACE_S
            self.index.expect(replica_id, keys[: request.num_prompt_tokens // route.block_size], now, lifetime_s)
        expected = Expected(request.num_prompt_tokens, decision.cached_tokens, self._expect_output(request))
        self.charges.begin(request.arrival, request.account, request.share, expected, request)
        self.send(replica_id, request, sid)


_SAMPLING = SamplingParams(1)


def _make_submit(request: SimulatedRequest) -> Submit:
    """What the client counts of a sequence: only its length and its class are read."""
    return Submit(
        0,
        "",
        bytes(4 * request.num_prompt_tokens),
        b"",
        b"",
        _SAMPLING,
        tenant=request.planned.tenant,
        service_class=request.share.service_class,
    )
