import pytest

from penstock.base.errors import ConfigError
from penstock.perf.planning.known import known_shape
from penstock.perf.planning.shape import parse_shape, parse_tokens


def test_a_shape_of_numbers_has_the_parameters_of_the_model_that_it_is() -> None:
    shape = parse_shape("layers=32,hidden=4096,heads=32,kv_heads=8,inner=14336,vocab=128256")
    known = known_shape("llama-3-8b")

    assert known is not None
    assert shape.num_params == known.num_params == 8_030_261_248


def test_parameters_that_are_given_are_all_there_are() -> None:
    shape = parse_shape("layers=80,hidden=8192,heads=64,kv_heads=8,params=70e9,vocab=128256")

    assert shape.num_params == 70_000_000_000
    assert shape.layer_params == 70_000_000_000 - 2 * 128256 * 8192
    assert shape.head_dim == 128


def test_tokens_are_numbers_or_multiples_of_1024() -> None:
    assert parse_tokens("8k") == 8192
    assert parse_tokens("300") == 300


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers=2,hidden=64,heads=4", "inner=N"),
        ("layers=2,hidden=64,inner=128", "lacks heads"),
        ("layers=2,hidden=64,heads=4,inner=128,depth=3", "'depth', which is none of"),
        ("layers=2.5,hidden=64,heads=4,inner=128", "layers=2.5 is no whole number"),
        ("layers=nan,hidden=64,heads=4,inner=128", "layers=nan is no whole number"),
        ("layers=2,hidden=inf,heads=4,inner=128", "hidden=inf is no whole number"),
        ("layers=2,hidden=64,heads=4,params=1e999", "params=1e999 is no whole number"),
        ("layers=2,hidden=64,heads=4,params=1e16", r"params=1e16 is more than can be planned for, 1e\+15"),
        ("layers=2,hidden=64,heads=4,inner=128,context=0", "max_context must be at least 1"),
        ("layers=2,hidden=64,heads=4,kv_heads=3,inner=128", "can't share 3"),
        ("layers=2,hidden=64,heads=4,params=1000,vocab=100", "fewer than the embedding"),
    ],
)
def test_a_wrong_shape_is_refused_with_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_shape(text)


def test_a_context_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        parse_tokens("0")
