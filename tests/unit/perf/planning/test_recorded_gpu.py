"""Planned times of decode steps beside those that bench/gpu.json has of a card."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.perf.planning.cards import CARDS, Card
from penstock.perf.planning.formats import FORMATS, KV_FORMATS, SERVED, WeightFormat, mix
from penstock.perf.planning.roofline import Roofline, rates_of
from penstock.perf.planning.shape import ModelShape

RECORD = Path(__file__).parents[4] / "bench" / "gpu.json"
CARD = "H100"
LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, intermediate_size=14336, vocab_size=128256)
ROW = re.compile(r"(int4|bf16)\S*, batch (\d+), context (\d+): decoding \(ours\), eager torch \(rival\)")
MOST_OFF = 0.12


class Measured(NamedTuple):
    form: str
    rows: int
    context: int
    step_s: float


def recorded() -> list[Measured]:
    """Whole steps."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    found = ((ROW.fullmatch(row["name"]), row["ours"]) for row in rows)
    return [Measured(name[1], int(name[2]), int(name[3]), int(name[2]) / rate) for name, rate in found if name]


def test_the_record_is_of_the_card_and_has_both_formats_at_several_batches() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))

    assert CARD in record["hardware"]["gpu"]
    assert {(each.form, each.rows) for each in recorded()} >= {
        (form, rows) for form in ("int4", "bf16") for rows in (1, 8, 64, 256)
    }


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("form", SERVED, ids=lambda form: form.name)
def test_with_one_row_bytes_bind_on_every_card(card: Card, form: WeightFormat) -> None:
    times = Roofline(LLAMA_8B, form, KV_FORMATS["bf16"], rates_of(card, LLAMA_8B, form, 1))

    assert (times.knee_rows or 2) > 1


def test_a_little_of_another_format_changes_little() -> None:
    def layers_s(form: WeightFormat, rows: int) -> float:
        times = Roofline(LLAMA_8B, form, KV_FORMATS["bf16"], rates_of(CARDS[CARD], LLAMA_8B, form, 1))
        return times.list_parts(rows, 0, 0, 0)[0].seconds

    for rows in (1, 256):
        mostly_int8 = mix({FORMATS["int8"]: 999.0, FORMATS["int4"]: 1.0})
        assert layers_s(mostly_int8, rows) == pytest.approx(layers_s(FORMATS["int8"], rows), rel=0.01)


@pytest.mark.parametrize("measured", recorded(), ids=str)
def test_a_decode_step_is_planned_within_12_per_cent(measured: Measured) -> None:
    form = FORMATS[measured.form]
    times = Roofline(LLAMA_8B, form, KV_FORMATS["bf16"], rates_of(CARDS[CARD], LLAMA_8B, form, 1))

    planned_s = times(rows=measured.rows, prefill_tokens=0, query_context=0, kv_tokens=measured.rows * measured.context)

    assert planned_s == pytest.approx(measured.step_s, rel=MOST_OFF)
