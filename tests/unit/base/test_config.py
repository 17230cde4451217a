from pathlib import Path
from typing import Literal

import msgspec
import pytest

from penstock.base.config import load, parse
from penstock.base.errors import ConfigError


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    block_size: int = 16
    base_s: float = 0.01
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"engine.block_size must be at least 1, not {self.block_size}")


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    served_names: tuple[str, ...] = ()
    engine: Engine = msgspec.field(default_factory=Engine)
    spare: Engine | None = None


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pools: tuple[Pool, ...] = ()


def sentence(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, Config, name="a.yaml")
    return caught.value.message


def test_a_file_becomes_a_frozen_struct(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(
        "pools:\n- name: edge\n  served_names: [a, b]\n  engine: {block_size: 32, base_s: 1e-3}\n", encoding="utf-8"
    )

    config = load(path, Config)

    assert config == Config(
        pools=(Pool(name="edge", served_names=("a", "b"), engine=Engine(block_size=32, base_s=0.001)),)
    )


def test_an_empty_file_is_all_defaults() -> None:
    assert parse("", Config, name="a.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pool: []", "a.yaml: pool is not a known setting (did you mean pools?)."),
        ("zzz: 1", "a.yaml: zzz is not a known setting (known here: pools)."),
        (
            "pools: [{name: a, engine: {blocksize: 1}}]",
            "a.yaml: pools[0].engine.blocksize is not a known setting (did you mean block_size?).",
        ),
        (
            "pools: [{name: a, spare: {devise: cpu}}]",
            "a.yaml: pools[0].spare.devise is not a known setting (did you mean device?).",
        ),
        ("pools: [{served_names: [a]}]", "a.yaml: pools[0].name is required and missing."),
        (
            "pools: [{name: a}, {name: a, engine: {block_size: big}}]",
            "a.yaml: pools[1].engine.block_size must be `int`, not 'big'.",
        ),
        (
            "pools: [{name: a, engine: {device: tpu}}]",
            "a.yaml: pools[0].engine.device must be one of cpu, cuda, not 'tpu'.",
        ),
        ("pools: [{name: a, engine: {block_size: 0}}]", "a.yaml: engine.block_size must be at least 1, not 0."),
        ("- a", "a.yaml: the file must be `object`, not ['a']."),
        ("pools: [{name: a, name: b}]", "a.yaml: is not valid YAML, line 1: the key 'name' stands there twice."),
        ("pools: [", "a.yaml: is not valid YAML, line 1: expected the node content, but found '<stream end>'."),
    ],
)
def test_a_mistake_is_one_sentence_with_field_and_value(text: str, expected: str) -> None:
    assert sentence(text) == expected


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml", Config)

    assert caught.value.message == f"{tmp_path / 'none.yaml'}: can't be read: No such file or directory."


def test_a_file_that_is_not_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"a: \xff")

    with pytest.raises(ConfigError) as caught:
        load(path, Config)

    assert caught.value.message == f"{path}: is not UTF-8 text (byte 3)."
