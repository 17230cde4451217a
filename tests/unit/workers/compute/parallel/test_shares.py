"""Parts that ranks hold: put together they are the whole, and only key/value heads are on several ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.workers.compute.model_config import ModelConfig
from penstock.workers.compute.parallel.shares import Share, deal, deal_heads, largest_config, make_shares
from penstock.workers.compute.quantization_config import Awq, PackQuantized
from penstock.workers.compute.weights import layout, parameter_shapes


def config(**changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "family": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": None, "has_rope_factors": False, "max_position_embeddings": 256, "sliding_window": None,
        "is_tied": False, "has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True, "has_qk_norm": True,
        "eos_token_ids": frozenset({2}),
    }  # fmt: skip
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    num_kv_heads, group = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    size = draw(st.integers(1, min(16, num_kv_heads * group)))
    inner = draw(st.integers(size, 900))
    groups = [None, *[Awq(count) for count in (1, 16, 32) if -(-inner // count) >= size], PackQuantized(8, None, True)]
    return config(
        vocab_size=draw(st.integers(size, 999)),
        intermediate_size=inner,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        quantization=draw(st.sampled_from(groups)),
    ), size


@given(models())
def test_put_together_the_shares_are_the_whole_and_only_kv_heads_are_on_several(drawn: tuple[ModelConfig, int]) -> None:
    model, size = drawn
    group = model.num_heads // model.num_kv_heads
    try:
        shares = make_shares(model, size)
    except ConfigError:
        assert size > model.num_kv_heads  # more ranks on one key/value head than it has query heads
        assert -(-size // model.num_kv_heads) > group
        return

    for part, count in (
        ("queries", model.num_heads),
        ("channels", model.intermediate_size),
        ("token_ids", model.vocab_size),
    ):
        parts = [getattr(share, part) for share in shares]
        assert [number for held in parts for number in held] == list(range(count))
        assert all(parts)
    copies = [sum(head in share.shared for share in shares) for head in range(model.num_kv_heads)]
    assert max(copies) == 1 if size <= model.num_kv_heads else max(copies) - min(copies) <= 1
    assert min(copies) == 1 or size > model.num_kv_heads
    for share in shares:
        assert {head // group for head in share.queries} == set(share.shared)
        assert len(share.queries) % len(share.shared) == 0  # as attention kernels want them


@given(models())
def test_rows_and_columns_cover_every_parameter_once(drawn: tuple[ModelConfig, int]) -> None:
    model, size = drawn
    try:
        shares = make_shares(model, size)
    except ConfigError:
        return

    for name, shape in parameter_shapes(layout(model)).items():
        rows = [number for share in shares for part in share.rows_of(name, model) or () for number in part]
        columns = [number for share in shares for number in share.columns_of(name, model) or ()]
        if rows:
            assert set(rows) == set(range(shape[0]))
            is_replicated = "qkv" in name and size > model.num_kv_heads
            assert is_replicated or len(rows) == shape[0]
        if columns:
            assert columns == list(range(shape[1]))
        assert not (rows and columns)
        assert sum(share.has(name) for share in shares) == (1 if name.endswith(("o_bias", "down_bias")) else size)


def test_the_demo_models_heads_are_dealt_whole() -> None:
    """Nine query heads over three key/value heads."""
    assert deal_heads(9, 3, 2) == [(range(6), range(2)), (range(6, 9), range(2, 3))]
    assert deal_heads(9, 3, 4) == [
        (range(2), range(1)),
        (range(2, 3), range(1)),
        (range(3, 6), range(1, 2)),
        (range(6, 9), range(2, 3)),
    ]
    assert [len(queries) for queries, _ in deal_heads(9, 3, 8)] == [1, 1, 1, 1, 1, 1, 2, 1]


def test_down_is_cut_on_borders_of_its_groups() -> None:
    shares = make_shares(config(intermediate_size=640, quantization=Awq(128)), 2)

    assert [share.channels for share in shares] == [range(384), range(384, 640)]


def test_qkv_of_a_rank_has_rows_of_its_own_heads() -> None:
    whole = config(num_heads=9, num_kv_heads=3, head_dim=4)
    share = make_shares(whole, 4)[2]

    assert share.rows_of("layers.1.qkv", whole) == [range(12, 24), range(36 + 4, 36 + 8), range(48 + 4, 48 + 8)]
    assert share.rows_of("layers.1.qkv_bias", whole) == share.rows_of("qkv", whole)
    assert share.columns_of("layers.0.o", whole) == range(12, 24)
    assert share.rows_of("layers.0.q_norm", whole) is None
    assert share.config_of(whole) == config(num_heads=3, num_kv_heads=1, head_dim=4)


def test_a_kv_cache_is_measured_by_the_rank_with_most_heads() -> None:
    assert largest_config(config(num_heads=9, num_kv_heads=3), 2).num_kv_heads == 2
    assert largest_config(config(), 1) == config()


@pytest.mark.parametrize(
    ("size", "changes", "sentence"),
    [
        (5, {}, "5 is too much for the checkpoint's 4 attention heads over 2 key/value heads"),
        (4, {"num_heads": 9, "num_kv_heads": 9, "intermediate_size": 256, "quantization": Awq(128)}, "256 channels"),
        (4, {"intermediate_size": 3}, "3 channels of an MLP in groups of 1"),
    ],
)
def test_more_ranks_than_there_are_parts_are_refused(size: int, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_shares(config(**changes), size)


def test_dealt_ranges_differ_by_a_unit_at_most() -> None:
    assert deal(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert deal(100, 3, 32) == [range(64), range(64, 96), range(96, 100)]
    assert [share.token_ids for share in make_shares(config(vocab_size=200), 2)] == [range(128), range(128, 200)]


def test_the_sum_has_biases_of_o_and_down_once() -> None:
    shares = make_shares(config(), 2)

    assert [
        [share.has(name) for share in shares] for name in ("layers.0.o_bias", "layers.1.down_bias", "layers.0.o")
    ] == [
        [True, False],
        [True, False],
        [True, True],
    ]
    assert isinstance(shares[0], Share)
