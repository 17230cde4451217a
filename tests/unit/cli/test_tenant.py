"""Where the commands about tenants find Redis and secret, and what they make of options."""

from pathlib import Path

import psutil
import pytest

from penstock.base.environment import CLUSTER_SECRET
from penstock.base.errors import ConfigError
from penstock.base.redis_roles import make_password
from penstock.cli.state import RunState, StateDir
from penstock.cli.tenant import Change, redis_of, secret_of
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
