import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from penstock.adapters.peft import (
    MAX_PATTERNS,
    WEIGHTS_FILE,
    Adapted,
    Settings,
    check_config,
    check_folder,
    check_tensors,
    read_header,
    refused_name,
)
from penstock.wire.errors import InvalidRequest
from tests.unit.adapters.files import BASE, config, name_of, safetensors, tensors_of, write
from tests.unit.workers.lora_files import adapted
from tests.unit.workers.tiny_models import SIZES, tiny_model

PLACE = "model.layers.1.self_attn.q_proj"


def checked(**changes: Any) -> Settings:
    return check_config(msgspec.json.encode(config(**changes)), max_rank=16)


def test_an_adapter_is_read_with_its_rank_scaling_and_places(tmp_path: Path) -> None:
    found = check_folder(write(tmp_path), BASE, max_rank=2)

    assert (found.rank, found.targets, found.has_magnitudes) == (2, ("down_proj", "q_proj"), False)
    assert set(found.modules) == {(layer, module) for layer in (0, 1) for module in ("q_proj", "down_proj")}
    assert found.modules[1, "q_proj"] == Adapted(name_of(1, "q_proj", "A"), name_of(1, "q_proj", "B"), 2.0)


@pytest.mark.parametrize("use_dora", [False, True])
def test_what_peft_itself_writes_is_accepted(use_dora: bool, tmp_path: Path) -> None:
    adapted(
        tiny_model("llama"),
        tmp_path,
        seed=1,
        rank=3,
        use_dora=use_dora,
        rank_pattern={"layers.1.mlp.up_proj": 5, "v_proj": 1},
        alpha_pattern={r"^model\.layers.0.self_attn.v_proj": 7},
    )
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    shapes = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)) | dict.fromkeys(
        ("k_proj", "v_proj"), (hidden // 2, hidden)
    )
    shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    found = check_folder(tmp_path, msgspec.structs.replace(BASE, modules=shapes), max_rank=8)

    assert (found.rank, len(found.modules), found.has_magnitudes) == (5, 14, use_dora)
    assert all((adapted.magnitude is not None) is use_dora for adapted in found.modules.values())
    own = {(1, "up_proj"): 6 / 5, (0, "v_proj"): 7.0, (1, "v_proj"): 6.0}
    assert {place: adapted.scaling for place, adapted in found.modules.items()} == dict.fromkeys(
        found.modules, 2.0
    ) | own


def test_rank_stabilized_scaling_is_alpha_by_the_root_of_the_rank() -> None:
    assert checked(r=4, lora_alpha=6, use_rslora=True).scaling_of(PLACE) == 6 / math.sqrt(4)
    assert checked(r=4, lora_alpha=6).scaling_of(PLACE) == 1.5
    assert checked(r=4, lora_alpha=6, rank_pattern={"q_proj": 9}, use_rslora=True).scaling_of(PLACE) == 2.0


PATTERNS = [
    "q_proj", "proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
    "^model.layers.1.self_attn.q_proj", "^layers.1.self_attn.q_proj", r"layers\.1\.self_attn\.q_proj",
    "self.attn.q_proj", "layers.11.self_attn.q_proj", "1.self_attn.q_proj", "self_attn", "q-proj",
]  # fmt: skip


def test_patterns_match_as_pefts_do_and_the_first_one_counts() -> None:
    for pattern in PATTERNS:
        expected = get_pattern_key([pattern], PLACE) == pattern
        assert (checked(rank_pattern={pattern: 7}).rank_of(PLACE) == 7) is expected, pattern
        assert (checked(alpha_pattern={pattern: 8}).scaling_of(PLACE) == 4.0) is (expected), pattern
    assert checked(rank_pattern={"self_attn.q_proj": 3, "q_proj": 5}).rank_of(PLACE) == 3
    assert checked(rank_pattern={"q_proj": 5, "self_attn.q_proj": 3}).rank_of(PLACE) == 5


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias: 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"rank_pattern": {"q_proj": 17}}, "rank is 17; this model serves ranks up to 16"),
        ({"rank_pattern": {"q_proj": 0}}, "ranks in rank_pattern of 1 or more"),
        ({"rank_pattern": ["q_proj"]}, "an object rank_pattern"),
        ({"alpha_pattern": {"q_proj": "4"}}, "numbers in alpha_pattern"),
        ({"rank_pattern": {"(a|a)*q": 4}}, "in rank_pattern is more than the name of a module"),
        ({"alpha_pattern": {".*q_proj": 4}}, "in alpha_pattern is more than the name of a module"),
        ({"rank_pattern": {"": 4}}, "more than the name of a module"),
        ({"rank_pattern": {f"q{place}": 4 for place in range(MAX_PATTERNS + 1)}}, "1025 entries in rank_pattern"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        ({"loftq_config": {"bits": 4}}, "option 'loftq_config' is not known"),
        ({"some_later_idea": True}, "option 'some_later_idea' is not known"),
        ({"r": 0}, "rank r of 1 or more"),
        ({"r": True}, "rank r of 1 or more"),
        ({"r": "8"}, "rank r of 1 or more"),
        ({"r": 17}, "rank is 17; this model serves ranks up to 16"),
        ({"r": 2**200}, "serves ranks up to 16"),
        ({"lora_alpha": None}, "number lora_alpha"),
        ({"lora_alpha": 1e300}, r"number lora_alpha of at most 1e\+06"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        checked(**changes)


def test_options_that_are_switched_off_do_not_matter() -> None:
    assert checked(some_later_idea=False, loftq_config={}, trainable_token_indices=None, init_lora_weights="gaussian")


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"\xff\xfe"])
def test_a_configuration_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not a JSON object"):
        check_config(data, 8)


def test_a_configuration_that_would_exhaust_the_reader_is_refused() -> None:
    whole = msgspec.json.encode(config())
    for number, sentence in (
        (b"1" + b"0" * 400, "number lora_alpha"),
        (b"1" + b"0" * 9000, "not a JSON object|number lora_alpha"),
        (b"[" * 10**5 + b"]" * 10**5, "nested too deeply"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            check_config(whole.replace(b'"lora_alpha":4', b'"lora_alpha":' + number), 8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"base_model.model.lm_head.lora_A.weight": (2, 8)},
            "only down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj can be adapted",
        ),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 8)}, "can be adapted"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (8,)}, "can be adapted"),
        ({"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": (2, 8)}, "can be adapted"),
        ({"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 8)}, "two tensors for one place"),
        ({name_of(2, "q_proj", "A"): (2, 8)}, "only 2 layers"),
        ({name_of(0, "k_proj", "A"): (2, 8)}, "only one of the two tensors of k_proj in layer 0"),
        ({name_of(0, "q_proj", "A"): (2, 9)}, r"has the shape \[2, 9\]; rank 2 and the base model ask for \[2, 8\]"),
        ({name_of(0, "q_proj", "B"): (8, 3)}, r"has the shape \[8, 3\]; rank 2 and the base model ask for \[8, 2\]"),
    ],
)
def test_tensors_that_do_not_fit_the_base_model_are_refused(
    change: dict[str, tuple[int, ...]], sentence: str, tmp_path: Path
) -> None:
    header = read_header(write(tmp_path, tensors=tensors_of() | change) / WEIGHTS_FILE)

    with pytest.raises(InvalidRequest, match=sentence):
        check_tensors(header, checked(), BASE)


@pytest.mark.parametrize(
    ("magnitudes", "sentence"),
    [({}, "has no lora_magnitude_vector of q_proj in layer 0"), ({"q_proj": (4,)}, r"base model ask for \[8\]")],
)
def test_dora_without_a_magnitude_for_every_row_is_refused(
    magnitudes: dict[str, tuple[int, ...]], sentence: str, tmp_path: Path
) -> None:
    more = {f"{name_of(0, module, 'A')[:-8]}magnitude_vector": shape for module, shape in magnitudes.items()}
    header = read_header(write(tmp_path, tensors=tensors_of(modules=("q_proj",)) | more) / WEIGHTS_FILE)

    with pytest.raises(InvalidRequest, match=sentence):
        check_tensors(header, checked(use_dora=True), BASE)


def test_an_adapter_without_tensors_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds no tensor"):
        check_tensors({}, checked(), BASE)


def test_types_that_are_not_floats_of_two_or_four_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(safetensors(tensors_of(), "F64"))

    with pytest.raises(InvalidRequest, match="has the type 'F64'; supported are F32, F16, BF16"):
        read_header(tmp_path / "a")


WHOLE = safetensors(tensors_of())


@given(
    data=st.one_of(
        st.binary(max_size=64),
        st.integers(0, len(WHOLE) - 1).map(lambda end: WHOLE[:end]),
        st.just(WHOLE + b"\0"),
        st.just(b"\xff" * 16),
    )
)
def test_a_damaged_file_is_refused_whatever_its_bytes(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_bytes(data)

    with pytest.raises(InvalidRequest, match="is not a safetensors file"):
        read_header(path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    first, second = name_of(0, "q_proj", "A"), name_of(0, "k_proj", "A")
    data = msgspec.json.encode(
        {
            first: {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
            second: {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
        }
    )
    (tmp_path / "a").write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))

    with pytest.raises(InvalidRequest, match="does not lie where its shape says"):
        read_header(tmp_path / "a")


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "its header can't be read"),
        (
            b'{"a":{"dtype":"F32","shape":[' + b"9223372036854775807," * 10**4 + b'1],"data_offsets":[0,0]}}',
            "has 10001 dimensions",
        ),
        (b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}', "does not lie where its shape says"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "does not lie where its shape says"),
    ],
)
def test_a_header_that_lies_or_would_exhaust_the_reader_is_refused(
    header: bytes, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))

    with pytest.raises(InvalidRequest, match=sentence):
        read_header(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("adapter_model.bin", "is a pickle, which can run code"), ("README.md", "An adapter is the two files")],
)
def test_other_files_are_refused_by_their_name(name: str, sentence: str) -> None:
    assert sentence in refused_name(name).message
