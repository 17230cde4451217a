"""Where the commands about tenants find Redis and secret, and what they make of options."""

import io
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from penstock.base.environment import CLUSTER_SECRET
from penstock.base.errors import ConfigError
from penstock.base.redis_roles import make_password
from penstock.cli.first_tenants import DefaultLimits, FirstTenant
from penstock.cli.state import RunState, StateDir
from penstock.cli.tenant import Change, TenantInfo, redis_of, secret_of, show_tenants
from penstock.tenancy.tenants import Limits, Settings

POOLS = "pools: [{name: demo}]\n"


def state_of(folder: Path, *, redis: str = "embedded", config: str = "none", is_alive: bool = True) -> StateDir:
    own = psutil.Process()
    started = own.create_time() if is_alive else 0.0
    state = StateDir(folder)
    state.write(
        RunState(
            pid=own.pid,
            pid_started=started,
            version="1",
            config=config,
            gateway="http://g",
            redis=redis,
            temp_dir="/tmp/penstock-x",
            pools=(),
        )
    )
    return state


def test_the_running_platforms_own_redis_is_its_socket(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    password = make_password(state.secret(), "operator")

    assert redis_of(state, None) == f"unix://penstock-operator:{password}@/tmp/penstock-x/redis/redis.sock"


def test_another_redis_is_read_from_the_configuration_with_its_password(tmp_path: Path) -> None:
    config = tmp_path / "penstock.yaml"
    config.write_text(f"redis: {{url: 'redis://:word@host:1'}}\n{POOLS}")

    assert redis_of(state_of(tmp_path, redis="redis://host:1", config=str(config)), None) == "redis://:word@host:1"
    assert redis_of(StateDir(tmp_path / "nothing"), config) == "redis://:word@host:1"


def test_where_nothing_runs_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "penstock.yaml"
    config.write_text(POOLS)

    for state in (StateDir(tmp_path / "nothing"), state_of(tmp_path, is_alive=False)):
        with pytest.raises(ConfigError, match=r"nothing runs with the state folder .* --config"):
            redis_of(state, None)
    with pytest.raises(ConfigError, match=r"has no redis\.url"):
        redis_of(state_of(tmp_path), config)


def test_a_secret_is_never_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_SECRET, raising=False)
    state = StateDir(tmp_path)
    with pytest.raises(ConfigError, match="holds no cluster secret"):
        secret_of(state)
    assert list(tmp_path.iterdir()) == []

    made = state.secret()
    assert secret_of(state) == made
    monkeypatch.setenv(CLUSTER_SECRET, "ab" * 16)
    assert secret_of(state) == b"\xab" * 16


def test_only_what_is_named_changes_and_nought_takes_a_limit_away() -> None:
    before = Settings(
        limits=Limits(requests_per_minute=5, tokens_per_minute=100), models=("a",), tier_policy="edge_only"
    )

    assert Change().applied(before) == before
    after = Change(requests_per_minute=0, max_parallel=3, models=("b", "b", "c")).applied(before)
    assert after == Settings(
        limits=Limits(tokens_per_minute=100, max_parallel=3), models=("b", "c"), tier_policy="edge_only"
    )
    assert Change(models=("*",), tier_policy="cloud_first").applied(after).models is None


def test_weight_and_class_change_by_themselves() -> None:
    before = Settings(limits=Limits(max_parallel=2), weight=2.0)
    after = Change(service_class="batch").applied(before)

    assert after == Settings(limits=Limits(max_parallel=2), weight=2.0, service_class="batch")
    assert Change(weight=0.5).applied(after).weight == 0.5


def test_a_file_of_first_tenants_may_name_weight_and_class() -> None:
    wanted = FirstTenant(name="acme", weight=3.0, service_class="interactive")

    assert wanted.settings(Limits()) == Settings(weight=3.0, service_class="interactive")


def test_a_first_tenant_gets_the_default_limits_that_it_does_not_name() -> None:
    defaults = Limits(requests_per_minute=60, max_parallel=4)
    wanted = FirstTenant(name="acme", requests_per_minute=0, tokens_per_minute=5)

    assert wanted.settings(defaults).limits == Limits(tokens_per_minute=5, max_parallel=4)
    assert DefaultLimits(requests_per_minute=0, max_parallel=4).limits == Limits(max_parallel=4)


def test_a_budget_is_changed_by_itself_and_0_takes_it_away() -> None:
    before = Settings(limits=Limits(max_parallel=2))
    after = Change(budget=12.5).applied(before)

    assert after.limits == Limits(max_parallel=2, budget=12.5)
    assert Change(weight=2.0).applied(after).limits == after.limits
    assert Change(budget=0.0).applied(after).limits == before.limits
    assert FirstTenant(name="acme", budget=3.0).settings(Limits(budget=9.0)).limits.budget == 3.0
    assert DefaultLimits(budget=0.0).limits == Limits()


@pytest.mark.parametrize(("weight", "service_class", "shown"), [(1.0, "standard", ""), (2.5, "batch", "2.5, batch")])
def test_shares_are_shown_where_one_is_not_the_default(weight: float, service_class: str, shown: str) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    info = TenantInfo(
        id="acme",
        requests_per_minute=None,
        tokens_per_minute=None,
        max_parallel=None,
        budget=None,
        spent=None,
        models=None,
        tier_policy="edge_first",
        weight=weight,
        service_class=service_class,
        created="then",
        updated="now",
        keys=(),
    )
    show_tenants([info], console)
    text = console.export_text()

    assert ("share" in text) == bool(shown)
    assert shown in text
