"""The arithmetic of docs/gpu.md, by hand for one model and card, and the document against it."""

import re

import pytest

from deploy import gpu_table
from deploy.gpu_table import CARDS, MODELS, Card, kv_token_bytes, kv_tokens, most_tokens_per_s, weight_bytes

EIGHT, SEVENTY = MODELS[0], MODELS[-1]
BY_NAME = {card.name: card for card in CARDS}
DOCUMENT = gpu_table.TARGET.read_text(encoding="utf-8")


def test_the_shapes_have_the_weights_that_their_names_say() -> None:
    found = [(model.layer_weights + 2 * model.table_weights) / 1e9 for model in MODELS]

    assert found == pytest.approx([8.03, 14.77, 32.76, 70.55], abs=0.01)


def test_weights_take_their_bits() -> None:
    assert weight_bytes(EIGHT, "bf16") == 2 * (EIGHT.layer_weights + 2 * EIGHT.table_weights)
    assert weight_bytes(EIGHT, "fp8") == pytest.approx(6.979e9 + 2 * 525.3e6 * 8.5 / 8, rel=1e-3)
    assert weight_bytes(EIGHT, "AWQ, 4 bits") == pytest.approx(6.979e9 * 4.15625 / 8 + 2 * 525.3e6 * 8.5 / 8, rel=1e-3)


def test_a_tokens_keys_and_values_are_two_numbers_for_each_channel_of_a_layers_heads() -> None:
    assert kv_token_bytes(EIGHT, "bf16") == 2 * 32 * 8 * 128 * 2 == 131072
    assert kv_token_bytes(EIGHT, "fp8") == 2 * 32 * 8 * (128 + 4)


def test_keys_and_values_have_what_weights_and_the_rest_leave() -> None:
    card = Card("hundred", 1, 100, 1000, 9.0)
    room = 90e9 - 2 * 2**30 - weight_bytes(EIGHT, "bf16")

    assert kv_tokens(EIGHT, "bf16", "bf16", card) == int(room // 131072)
    assert kv_tokens(SEVENTY, "bf16", "bf16", card) is None, "the weights alone do not fit"
    assert kv_tokens(EIGHT, "bf16", "fp8", card._replace(capability=8.6)) is None
    assert kv_tokens(EIGHT, "fp8", "bf16", card._replace(capability=8.6)) is None


def test_two_cards_have_twice_the_memory_and_the_bandwidth() -> None:
    one, two = BY_NAME["H200"], BY_NAME["2 H200"]

    assert kv_tokens(SEVENTY, "bf16", "bf16", one) is None
    assert kv_tokens(SEVENTY, "bf16", "bf16", two) == pytest.approx(332e3, rel=0.01)
    assert most_tokens_per_s(EIGHT, "bf16", two) == 2 * most_tokens_per_s(EIGHT, "bf16", one)


def test_a_token_reads_the_layers_and_the_head_but_not_the_embedding() -> None:
    read = 2 * (EIGHT.layer_weights + EIGHT.table_weights)

    assert most_tokens_per_s(EIGHT, "bf16", BY_NAME["H200"]) == pytest.approx(4800e9 / read)


def test_the_document_has_the_tables() -> None:
    assert gpu_table.insert(DOCUMENT) == DOCUMENT, "python -m deploy.gpu_table writes them"
    assert DOCUMENT.count(gpu_table.BEGIN) == DOCUMENT.count(gpu_table.END) == 1


def test_what_the_small_preset_says_of_its_room_is_so() -> None:
    """Both models' keys and values lie in the same blocks."""
    draft = gpu_table.Model("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256)
    text = (gpu_table.TARGET.parents[1] / "deploy" / "helm" / "values-gpu-small.yaml").read_text(encoding="utf-8")
    said = re.search(r"kv_memory_bytes: (\d+) +# (\d+) GiB: (\d+),000 tokens", text)

    assert said is not None
    assert int(said[1]) == int(said[2]) * 2**30
    tokens = int(said[1]) / (kv_token_bytes(EIGHT, "fp8") + kv_token_bytes(draft, "fp8"))
    assert tokens / 1000 == pytest.approx(int(said[3]), abs=1)
    l4 = BY_NAME["L4"]
    weights = weight_bytes(EIGHT, "AWQ, 4 bits") + weight_bytes(draft, "bf16") - draft.table_weights * 2
    assert weights + int(said[1]) + gpu_table.BESIDE_BYTES < gpu_table.USABLE * l4.memory_gb * 1e9


def test_every_sentence_that_the_document_explains_is_one_that_somebody_says() -> None:
    section = DOCUMENT.partition("## When it does not start")[2].partition("What others say")[0]
    explained = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    folder = gpu_table.TARGET.parents[1]
    files = [*(folder / "platform").rglob("*.py"), *(folder / "deploy" / "helm" / "templates").rglob("*.tpl")]
    said = "\n".join(path.read_text(encoding="utf-8") for path in files)

    assert len(explained) > 10
    assert [sentence for sentence in explained if sentence not in said] == []
