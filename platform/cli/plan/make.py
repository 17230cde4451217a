"""The plan: every way to serve a model that the question allows, weighed, and the cheapest of them."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.base.errors import ConfigError
from penstock.cli.plan.checkpoints import Found, find_model
from penstock.cli.plan.measured import Measured
from penstock.cli.plan.question import THIS_MACHINE, Question, parse_card, parse_form, parse_kv
from penstock.perf.planning.cards import CARDS, Card
from penstock.perf.planning.choice import Option, Place, can_compute, cheapest, kv_formats, weigh
from penstock.perf.planning.formats import BF16, KV_FORMATS, SERVED, KvFormat, WeightFormat, held_on_cpu
from penstock.perf.planning.memory import GB, Draft, Setting
from penstock.perf.planning.money import Proposed, propose_tariff
from penstock.perf.planning.roofline import FittedTimes, Rates, Roofline, StepTimes, rates_of
from penstock.perf.planning.shape import ModelShape
from penstock.workers.config import DEVICE_DEFAULTS, MOST_AUTO_TOKENS

COUNTS = (1, 2, 4, 8)
"""Cards of a replica that are tried."""


class Machine(NamedTuple):
    """A machine without a GPU, the one that the command runs on."""

    memory_bytes: int
    threads: int
    rates: dict[str, Rates]
    """Rates by the format of the weights."""
    note: str
    """How they were measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    question: Question
    found: Found
    options: tuple[Option, ...]
    best: Option | None
    """The cheapest that serves; without prices, the first that does."""
    tariff: Proposed | None
    machine: Machine | None
    measured: Measured | None

    @property
    def shown(self) -> Option | None:
        """The option that is told in full: the best, else the one with the most room."""
        return self.best or max(self.options, key=lambda option: option.memory.kv_bytes, default=None)


def make_plan(
    question: Question, found: Found, machine: Machine | None = None, measured: Measured | None = None
) -> Plan:
    """Weigh all options. Raises ConfigError where nothing can be asked so."""
    draft = _find_draft(question)
    options = tuple(_weigh_all(question, found, draft, machine, measured))
    if not options:
        raise ConfigError("no card of the table reads these formats; name others by --weights and --kv")
    best = cheapest(options) or next((option for option in options if option.serves), None)
    costs = None if best is None else best.costs
    tariff = None if costs is None else propose_tariff(costs, question.utilisation, question.margin)
    return Plan(question, found, options, best, tariff, machine, measured)


def _weigh_all(
    question: Question, found: Found, draft: Draft | None, machine: Machine | None, measured: Measured | None
) -> Iterator[Option]:
    for name in question.gpus or tuple(CARDS):
        if name == THIS_MACHINE:
            assert machine is not None, "whoever asks for this machine has measured it"
            yield from _on_machine(question, found, draft, machine, measured)
            continue
        yield from _on_card(question, found, draft, parse_card(name), measured)


def _on_card(
    question: Question, found: Found, draft: Draft | None, card: Card, measured: Measured | None
) -> Iterator[Option]:
    shape = found.shape
    memory = card.memory_gb if question.memory_gb is None else question.memory_gb
    price = card.price_per_hour if question.price_per_hour is None else question.price_per_hour
    counts = COUNTS if question.count is None else (question.count,)
    for form, kv in itertools.product(_forms(question, found), _kvs(question, is_gpu=True)):
        if not can_compute(card, form, kv):
            continue
        for count in counts:
            setting = make_setting(question, form, kv, draft, head=found.head, parts=count, is_gpu=True)
            place = Place(card.name, round(memory * GB), count, None if price is None else price * count)
            times = _times(shape, setting, rates_of(card, shape, form, count), measured)
            option = weigh(place, shape, setting, times, question.load, question.targets)
            if question.count is not None or option.serves or count == counts[-1]:
                yield option
                break


def _on_machine(
    question: Question, found: Found, draft: Draft | None, machine: Machine, measured: Measured | None
) -> Iterator[Option]:
    memory = machine.memory_bytes if question.memory_gb is None else round(question.memory_gb * GB)
    place = Place("this machine", memory, 1, question.price_per_hour)
    kvs = [kv for kv in _kvs(question, is_gpu=False) if kv in kv_formats(None)]
    for form, kv in itertools.product(_forms(question, found, is_gpu=False), kvs):
        held = held_on_cpu(form)
        setting = make_setting(question, held, kv, draft, head=found.head, parts=1, is_gpu=False)
        times = _times(found.shape, setting, machine.rates[held.name], measured)
        yield weigh(place, found.shape, setting, times, question.load, question.targets)


def _times(shape: ModelShape, setting: Setting, rates: Rates, measured: Measured | None) -> StepTimes:
    if measured is not None:
        return FittedTimes(measured.costs)
    return Roofline(shape, setting.form, setting.kv, rates, setting.head, setting.parts)


def make_setting(
    question: Question,
    form: WeightFormat,
    kv: KvFormat,
    draft: Draft | None,
    *,
    head: object,
    parts: int,
    is_gpu: bool,
) -> Setting:
    """What a pool of these formats is set to, by the defaults of its device."""
    defaults = DEVICE_DEFAULTS["cuda" if is_gpu else "cpu"]
    rows, tokens = defaults["max_num_seqs"], defaults["max_batched_tokens"]
    file = None if question.draft_head is None else Path(question.draft_head).expanduser()
    if file is not None and not file.is_file():
        raise ConfigError(f"--draft-head: there is no file {file}")
    return Setting(
        question.context_tokens,
        form,
        kv,
        head=head,  # type: ignore[arg-type]  # one of Head, by the command's own check
        parts=parts,
        memory_share=question.memory_share,
        max_num_seqs=question.max_num_seqs or int(rows),
        max_batched_tokens=question.max_batched_tokens or (MOST_AUTO_TOKENS if tokens == "auto" else int(tokens)),
        adapter_slots=question.adapter_slots,
        adapter_rank=question.adapter_rank,
        draft=draft,
        draft_head_bytes=0 if file is None else file.stat().st_size,
        is_gpu=is_gpu,
    )


def _find_draft(question: Question) -> Draft | None:
    if question.draft is None:
        return None
    found = find_model(question.draft, None)
    return Draft(found.shape, found.form or BF16)


def _forms(question: Question, found: Found, *, is_gpu: bool = True) -> tuple[WeightFormat, ...]:
    """Formats to weigh: those that are named, else the checkpoint's own and, where it is not quantized, those that it
    could be made into."""
    if question.forms:
        return tuple(map(parse_form, question.forms))
    if found.form is not None and found.form.is_quantized:
        return (found.form,)
    return SERVED if is_gpu else tuple(form for form in SERVED if form in (BF16, SERVED[-1]))


def _kvs(question: Question, *, is_gpu: bool) -> tuple[KvFormat, ...]:
    if question.kvs:
        return tuple(map(parse_kv, question.kvs))
    return KV_FORMATS["bf16"], KV_FORMATS["fp8"] if is_gpu else KV_FORMATS["int8"]


def forms_on_machine(question: Question, found: Found) -> tuple[WeightFormat, ...]:
    """Formats whose products are to be measured here."""
    return tuple(dict.fromkeys(held_on_cpu(form) for form in _forms(question, found, is_gpu=False)))


def to_tree(plan: Plan) -> dict[str, object]:
    """The plan for scripts: plain JSON, infinite targets as null."""
    question = plan.question
    return {
        "model": {
            "name": plan.found.shape.name,
            "origin": plan.found.origin,
            "parameters": plan.found.shape.num_params,
            "layers": plan.found.shape.num_layers,
            "kv_heads": plan.found.shape.num_kv_heads,
            "head_dim": plan.found.shape.head_dim,
        },
        "context_tokens": question.context_tokens,
        "targets": {name: _finite(value) for name, value in question.targets._asdict().items()},
        "load": question.load._asdict(),
        "options": [_option(option, is_best=option is plan.best) for option in plan.options],
        "tariff": None if plan.tariff is None else plan.tariff._asdict(),
        "measured": None if plan.measured is None else msgspec.to_builtins(plan.measured.costs),
        "machine": None if plan.machine is None else plan.machine.note,
    }


def _option(option: Option, *, is_best: bool) -> dict[str, object]:
    memory = option.memory
    return {
        "card": option.place.name,
        "count": option.place.parts,
        "weights": option.form.name,
        "kv": option.kv.name,
        "is_cheapest": is_best,
        "serves": option.serves,
        "reason": option.reason,
        "memory": {
            "total_bytes": memory.total_bytes,
            "reserve_bytes": memory.reserve_bytes,
            "lines": [line._asdict() for line in memory.lines],
            "kv_bytes": memory.kv_bytes,
            "kv_tokens": memory.kv_tokens,
            "sequence_bytes": memory.sequence_bytes,
            "sequences": memory.room._asdict(),
        },
        "replicas": option.replicas,
        "price_per_hour": option.place.price_per_hour,
        "price_per_month": option.month,
        "cost_of_million": None if option.costs is None else option.costs._asdict(),
        "full": None if option.full is None else option.full._asdict(),
        "at_load": None if option.steady is None else option.steady._asdict(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
