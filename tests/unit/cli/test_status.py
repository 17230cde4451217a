import io

import httpx
import msgspec
import psutil
import pytest
from rich.console import Console

from penstock.base.metrics import Metrics
from penstock.cli.state import PoolState, RunState
from penstock.cli.status import Health, TargetHealth, by_pool, observe, show

POOL = PoolState(name="demo", model="demo", served_names=("a", "b"), tier="cloud", runner="torch", replicas=2)


@pytest.fixture
def state() -> RunState:
    own = psutil.Process()
    return RunState(
        pid=own.pid,
        pid_started=own.create_time(),
        version="1.2",
        config="c",
        gateway="http://gateway",
        redis="embedded",
        temp_dir="t",
        pools=(POOL,),
    )


def gateway(is_ready: bool, replicas: int) -> httpx.Client:
    metrics = Metrics()
    metrics.replicas.labels("demo", "cloud").set(replicas)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200 if is_ready else 503)
        return httpx.Response(200, content=metrics.render())

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_a_ready_platform_tells_its_replicas(state: RunState) -> None:
    health = observe(state, gateway(is_ready=True, replicas=2))

    assert (health.is_running, health.is_ready) == (True, True)
    assert health.pools[0].replicas_ready == 2


def test_a_gateway_that_is_not_ready_is_reported_with_what_it_knows(state: RunState) -> None:
    health = observe(state, gateway(is_ready=False, replicas=1))

    assert (health.is_running, health.is_ready) == (True, False)
    assert health.pools[0].replicas_ready == 1


def test_figures_come_from_the_port_for_operators_where_there_is_one(state: RunState) -> None:
    apart = msgspec.structs.replace(state, admin="http://admin")
    whole = gateway(is_ready=True, replicas=2)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "gateway" and request.url.path == "/metrics":
            return httpx.Response(404, json={"error": {"code": "not_found"}})
        return whole.get(str(request.url))

    health = observe(apart, httpx.Client(transport=httpx.MockTransport(answer)))

    assert health.is_ready
    assert health.pools[0].replicas_ready == 2


def test_a_gateway_that_does_not_answer_is_not_ready(state: RunState) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    health = observe(state, httpx.Client(transport=httpx.MockTransport(refuse)))

    assert (health.is_running, health.is_ready, health.pools[0].replicas_ready) == (True, False, 0)


def test_a_process_that_is_gone_is_not_asked(state: RunState) -> None:
    gone = msgspec.structs.replace(state, pid_started=state.pid_started + 100)

    assert not observe(gone, gateway(is_ready=True, replicas=2)).is_running


def test_replicas_are_summed_over_tiers() -> None:
    metrics = Metrics()
    metrics.replicas.labels("a", "edge").set(1)
    metrics.replicas.labels("a", "cloud").set(2)
    metrics.replicas.labels("b", "cloud").set(0)

    assert by_pool(metrics.render().decode(), "penstock_replicas") == {"a": 3, "b": 0}


def test_a_scaled_pool_wants_what_the_autoscaler_says(state: RunState) -> None:
    metrics = Metrics()
    metrics.autoscale_target.labels("demo").set(5)
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=metrics.render())))

    assert observe(state, client).pools[0].replicas_wanted == 5


def test_requests_in_target_are_shown_by_model_and_class(state: RunState) -> None:
    metrics = Metrics()
    for tier, outcome, count in (("edge", "met", 90), ("edge", "tpot", 7), ("cloud", "met", 2), ("cloud", "failed", 1)):
        metrics.slo_requests.labels("m", "interactive", tier, outcome).inc(count)
    metrics.slo_requests.labels("m", "batch", "edge", "met").inc(0)
    metrics.slo_burn_rate.labels("m", "interactive", "edge", "5m").set(7.5)
    metrics.slo_burn_rate.labels("m", "interactive", "cloud", "5m").set(33.0)
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, content=metrics.render())))
    out = io.StringIO()

    health = observe(state, client)
    show(health, Console(file=out, width=120))

    assert health.targets == (TargetHealth("m", "interactive", 100, 92, {"5m": 33.0}),)
    assert "92.00 %" in out.getvalue()


def test_people_see_a_table_and_scripts_get_all_of_it(state: RunState) -> None:
    health = observe(state, gateway(is_ready=True, replicas=1))
    out = io.StringIO()

    show(health, Console(file=out, width=120))

    assert "penstock 1.2, ready: http://gateway" in out.getvalue()
    assert "1 of 2" in out.getvalue()
    assert msgspec.json.decode(msgspec.json.encode(health), type=Health) == health
