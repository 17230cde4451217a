import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.planning.formats import (
    BF16,
    EXACT4,
    FORMATS,
    FP8,
    INT4,
    INT8,
    KV_FORMATS,
    kv_token_bytes,
    scale_bytes,
    table_bytes,
    weight_bytes,
)
from penstock.perf.planning.known import known_names, known_shape
from penstock.perf.planning.memory import GB, Draft, MemoryPlan, Setting, plan_memory
from penstock.perf.planning.shape import ModelShape, parse_shape


def known(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


LLAMA_13B = known("llama-2-13b")
LLAMA_70B = known("llama-3-70b")
SEVENTY = parse_shape("layers=80,hidden=8192,heads=64,kv_heads=8,params=70e9")


def test_llama_2_13b_in_fp16_takes_26_gb_and_3_36_gb_of_kv_for_4096_tokens() -> None:
    assert round(weight_bytes(LLAMA_13B, BF16) / GB, 1) == 26.0
    assert round(4096 * kv_token_bytes(LLAMA_13B, KV_FORMATS["bf16"]) / GB, 2) == 3.36


def test_80_layers_of_8_heads_of_128_take_2_68_gb_of_kv_for_8192_tokens() -> None:
    num_bytes = 8192 * kv_token_bytes(SEVENTY, KV_FORMATS["bf16"])

    assert round(num_bytes / GB, 2) == 2.68
    assert num_bytes == 2.5 * 2**30


def test_tables_are_rounded_beside_integers_and_left_in_16_bits_beside_8_bit_floats() -> None:
    tables = {form.name: table_bytes(LLAMA_70B, form, "auto") for form in (BF16, FP8, INT8)}

    assert tables["bf16"] == tables["fp8"] == 2 * LLAMA_70B.table_params
    assert tables["int8"] == (1 + 2 / 32) * LLAMA_70B.table_params
    assert table_bytes(LLAMA_70B, FP8, "int8") == tables["int8"]


def test_70b_at_exactly_4_bits_leaves_80_gb_for_16_sequences_and_for_13_with_a_tenth_reserved() -> None:
    assert weight_bytes(SEVENTY, EXACT4) == 35 * GB

    room = plan_memory(SEVENTY, Setting(8192, EXACT4), 80 * GB).room

    assert (room.bare, room.reserved) == (16, 13)


def test_70b_in_4_bits_with_everything_that_a_pool_holds_is_what_the_sum_gives() -> None:
    plan = plan_memory(LLAMA_70B, Setting(8192, INT4, head="keep", adapter_slots=8), 80 * GB)

    by_hand = 80 * GB * 0.9 - sum(
        (
            80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672) / 2,  # numbers of 4 bits
            80 * (2 * 8192 * 64 + 2 * 1024 * 64 + 2 * 28672 * 64 + 8192 * 224) * 4,  # scale and offset of each 128
            2 * 128256 * 8192 * 2,  # embedding and head in 16 bits
            (2 * 80 + 1) * 8192 * 2,
            8 * 80 * (2 * 32 * (2 * 16384 + 2 * 9216 + 3 * 36864) + 4 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192)),
            8192 * 2 * (3 * 8192 + 80 * 128 + 3 * 28672) + 256 * 5 * 3 * 4 * 128256,  # activations, logits
            10**9,  # recorded steps and libraries
        )
    )
    assert plan.kv_bytes == pytest.approx(by_hand, abs=10)
    assert plan.room.itemised == by_hand // (2.5 * 2**30) == 7
    assert plan.room.without_adapters == 9


def test_kv_in_8_bits_takes_half_but_for_its_scales() -> None:
    half = kv_token_bytes(LLAMA_70B, KV_FORMATS["fp8"])
    whole = kv_token_bytes(LLAMA_70B, KV_FORMATS["bf16"])

    assert whole / half == 2 * 128 / (128 + 4)


def test_scales_of_int4_are_counted_beside_the_numbers() -> None:
    assert scale_bytes(LLAMA_70B, EXACT4) == 0
    assert scale_bytes(LLAMA_70B, INT4) == pytest.approx(LLAMA_70B.layer_params / 128 * 4)


def test_embedding_and_head_stay_in_16_bits_where_they_are_kept() -> None:
    assert table_bytes(LLAMA_70B, INT4, "keep") == LLAMA_70B.table_params * 2
    assert table_bytes(LLAMA_70B, INT4, "auto") == LLAMA_70B.table_params * 8.5 / 8
    assert table_bytes(LLAMA_70B, BF16, "auto") == LLAMA_70B.table_params * 2


def test_grouped_heads_divide_the_kv_among_cards_as_far_as_there_are_heads() -> None:
    whole = plan_memory(LLAMA_70B, Setting(8192, INT4), 80 * GB).token_bytes
    tokens = {parts: plan_memory(LLAMA_70B, Setting(8192, INT4, parts=parts), 80 * GB).token_bytes for parts in (2, 16)}

    assert tokens[2] == whole / 2
    assert tokens[16] == whole / 8


def test_a_draft_model_takes_its_weights_and_its_own_kv() -> None:
    draft = known("llama-3.2-1b")
    plain = plan_memory(LLAMA_70B, Setting(8192, INT4), 80 * GB)
    drafted = plan_memory(LLAMA_70B, Setting(8192, INT4, draft=Draft(draft, BF16)), 80 * GB)

    assert drafted.taken_bytes - plain.taken_bytes == round(weight_bytes(draft, BF16))
    assert drafted.token_bytes - plain.token_bytes == kv_token_bytes(draft, KV_FORMATS["bf16"])


def test_every_known_shape_has_the_parameters_that_its_name_says() -> None:
    stated = {
        "smollm2-135m": 134_515_008,
        "smollm2-1.7b": 1_711_376_384,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-7b": 7_615_616_512,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "llama-2-13b": 13_015_864_320,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3.2-1b": 1_235_814_400,
        "mistral-7b": 7_248_023_552,
    }

    assert {name: known(name).num_params for name in stated} == stated
    for name in known_names():
        digits = float(name.split("-")[-1].rstrip("bm")) * (1e6 if name.endswith("m") else 1e9)
        assert known(name).num_params == pytest.approx(digits, rel=0.27), name


@given(
    st.sampled_from([known(name) for name in ("llama-3-8b", "qwen3-32b", "smollm2-135m")]),
    st.sampled_from(list(itertools.product(FORMATS.values(), KV_FORMATS.values()))),
    st.integers(16, 40_000),
    st.integers(1, 4),
    st.integers(10**8, 2 * 10**11),
    st.integers(0, 8),
)
def test_lines_and_what_is_left_add_up_to_the_memory(
    shape: ModelShape, formats: tuple, context: int, parts: int, total: int, slots: int
) -> None:
    form, kv = formats
    setting = Setting(context, form, kv, parts=parts, adapter_slots=slots)

    plan: MemoryPlan = plan_memory(shape, setting, total)

    assert plan.reserve_bytes + plan.taken_bytes + plan.kv_bytes == total
    assert plan.room.itemised <= plan.room.without_adapters
    assert plan.room.itemised * plan.sequence_bytes <= max(0, plan.kv_bytes)
    assert plan.room.reserved <= plan.room.bare
