from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
import yaml

from penstock.autoscale.config import AutoscaleConfig
from penstock.autoscale.policy import Reason
from penstock.base.config import parse
from penstock.base.errors import ConfigError
from penstock.cli.config import PlatformConfig

EXAMPLE = Path(__file__).resolve().parents[3] / "penstock.yaml"


def test_the_defaults_that_the_example_lists_are_the_defaults() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").split("autoscale: null")[1].splitlines()[1:]
    listed = "\n".join(
        line.strip().removeprefix("#").strip() for line in takewhile(lambda line: line.strip().startswith("#  "), lines)
    )

    assert yaml.safe_load(listed) == msgspec.json.decode(msgspec.json.encode(AutoscaleConfig()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("min_replicas: -1", "autoscale.min_replicas can't be negative, like -1"),
        ("idle_s: 0", "autoscale.idle_s must be more than 0, not 0"),
        ("min_replicas: 5", "autoscale.max_replicas (4) is below autoscale.min_replicas (5)"),
        ("target_utilisation: 1.5", "autoscale.target_utilisation is a share above 0 and up to 1, not 1.5"),
        ("scale_down_margin: 1", "autoscale.scale_down_margin is a share from 0 and below 1, not 1.0"),
        ("window_s: 0", "autoscale.window_s must be more than 0, not 0.0"),
        ("scale_down_delay_s: -1", "autoscale.scale_down_delay_s can't be negative, like -1.0"),
        (
            "min_replicas: 2",
            "pools['a'].replicas (1) must lie between autoscale.min_replicas (2) and autoscale.max_replicas (4)",
        ),
        ("max: 3", "max"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"pools: [{{name: a, autoscale: {{{settings}}}}}]", PlatformConfig, name="a.yaml")

    assert expected in str(error.value)


def test_every_reason_is_explained_in_the_docs() -> None:
    text = (EXAMPLE.parent / "docs" / "autoscaling.md").read_text(encoding="utf-8")

    assert [reason.value for reason in Reason if f"`{reason.value}`" not in text] == []
