"""What `penstock plan` is asked, and how its options are read."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.perf.planning.cards import CARDS, Card, find_card
from penstock.perf.planning.choice import kv_formats
from penstock.perf.planning.formats import FORMATS, KV_FORMATS, KvFormat, WeightFormat
from penstock.perf.planning.loads import Load, Targets
from penstock.perf.planning.shape import ModelShape

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_UNITS = {"ms": 1e-3, "s": 1.0}
THIS_MACHINE = "cpu"
"""Name of `--gpu` for the machine that the command runs on."""
DEFAULT_CONTEXT = 8192
"""Tokens of a sequence where nobody says, as far as the model goes."""
LEAST_RATE_RPS = 1e-6
"""Lowest rate that is one: a request in eleven days."""
MOST_COUNT = 1024
MOST_ROWS = 10**6
"""Most sequences of a step, slots for adapters, and rows of their factors."""
MOST_STEP_TOKENS = 10**8


@dataclass(frozen=True, slots=True)
class Question:
    gpus: tuple[str, ...]
    """Cards to consider; none: all of the table."""
    count: int | None
    """Cards of a replica; None: 1, 2, 4 and 8 are tried."""
    context_tokens: int
    targets: Targets
    load: Load
    """Requests of the whole pool; a rate of 0: of one replica, as many as it carries."""
    forms: tuple[str, ...] = ()
    """Formats of weights; none: the checkpoint's own, or all."""
    kvs: tuple[str, ...] = ()
    """Formats of keys and values; none: bf16, and 8 bits where they are read."""
    head: str = "auto"
    adapter_slots: int = 0
    adapter_rank: int = 32
    draft: str | None = None
    """Draft model, named like the model."""
    draft_head: str | None = None
    """File of a draft head."""
    memory_share: float = 0.9
    memory_gb: float | None = None
    """Memory of a card, instead of the table's."""
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    price_per_hour: float | None = None
    """Price of a card; of the machine, for this one."""
    utilisation: float = 0.6
    """Part of what is paid for that is expected to be used, in the proposed tariff."""
    margin: float = 0.2
    """What the proposed tariff adds to the cost, as a part of it."""

    def __post_init__(self) -> None:
        for option, value, least, most in (
            ("utilisation", self.utilisation, 0.001, 1),
            ("margin", self.margin, 0, 1000),
            ("memory-share", self.memory_share, 0.001, 1),
            ("memory", self.memory_gb, 0.01, 1e6),
            ("price-per-hour", self.price_per_hour, 0, 1e9),
            ("count", self.count, 1, MOST_COUNT),
            ("adapters", self.adapter_slots, 0, MOST_ROWS),
            ("rank", self.adapter_rank, 1, MOST_ROWS),
            ("max-num-seqs", self.max_num_seqs, 1, MOST_ROWS),
            ("max-batched-tokens", self.max_batched_tokens, 1, MOST_STEP_TOKENS),
        ):
            if value is not None:
                check_number(option, value, least, most)
        if self.load.rate_rps:
            check_number("rate", self.load.rate_rps, LEAST_RATE_RPS, 1e9)
        check_kvs(self.gpus, self.kvs)
        whole = self.load.prompt_tokens + self.load.cached_tokens + self.load.output_tokens
        if whole > self.context_tokens:
            raise ConfigError(
                f"a request of {whole:.0f} tokens, prompt and output, is longer than --context {self.context_tokens}"
            )


def check_kvs(gpus: Iterable[str], kvs: Sequence[str]) -> None:
    """Raises ConfigError where a format of keys and values is named that none of the devices has, or a device that has
    none of these formats. gpus: those that are named; none: all of the table, of which some may have none."""
    wanted = dict.fromkeys(map(parse_kv, kvs))
    named = tuple(gpus)
    devices = named or tuple(CARDS)
    read = {name: kv_formats(None if name == THIS_MACHINE else parse_card(name)) for name in devices}
    unread = [kv.name for kv in wanted if not any(kv in formats for formats in read.values())]
    if unread:
        raise ConfigError(
            f"--kv {unread[0]} is not for {', '.join(f'--gpu {name}' for name in devices)}; 8-bit keys and values are "
            "int8 on a CPU, fp8 on a GPU of compute capability 8.9 or more"
        )
    without = [name for name in named if wanted and wanted.keys().isdisjoint(read[name])]
    if without:
        has = " or ".join(kv.name for kv in read[without[0]])
        raise ConfigError(f"--kv {', '.join(kvs)}: --gpu {without[0]} keeps keys and values in {has}")


def check_number(option: str, value: float, least: float, most: float) -> None:
    """Raises ConfigError where an option's number is not from least to most; nan never is."""
    if not least <= value <= most:
        raise ConfigError(f"--{option} is a number from {least:g} to {most:g}, not {str(value)[:20]}")


def find_context(asked: int | None, request_tokens: int, shape: ModelShape) -> int:
    """Tokens of a sequence: as many as are asked, else DEFAULT_CONTEXT as far as the model goes. request_tokens: those
    of a request of the load, prompt and output. Raises ConfigError where the model takes fewer than either."""
    longest = shape.max_context
    if longest is None:
        return DEFAULT_CONTEXT if asked is None else asked
    if asked is not None and asked > longest:
        raise ConfigError(f"--context {asked} is more than {shape.name} takes: it was made for {longest} tokens")
    if request_tokens > longest:
        raise ConfigError(
            f"a request of {request_tokens} tokens, prompt and output, is more than {shape.name} takes: it was made "
            f"for {longest} tokens"
        )
    return min(DEFAULT_CONTEXT, longest) if asked is None else asked


def parse_duration(text: str) -> float:
    """Seconds of `50ms` or `1.5s`. Raises ConfigError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ConfigError(f"{text!r} is no duration above 0, like 50ms or 1.5s")
    return float(found[1]) * _UNITS[found[2]]


def parse_targets(text: str | None) -> Targets:
    """Read `ttft=1s,tpot=50ms`; either may be left out. Raises ConfigError."""
    if text is None:
        return Targets()
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot"):
            raise ConfigError(f"--slo has {name!r}; ttft and tpot are targets, like ttft=1s,tpot=50ms")
        found[name] = parse_duration(value)
    return Targets(found.get("ttft", math.inf), found.get("tpot", math.inf))


def parse_card(name: str) -> Card:
    card = find_card(name)
    if card is None:
        raise ConfigError(f"--gpu {name} is not in the table: {', '.join(CARDS)}, or {THIS_MACHINE} (this machine)")
    return card


def parse_form(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise ConfigError(f"--weights {name} is none of {', '.join(FORMATS)}")
    return FORMATS[name]


def parse_kv(name: str) -> KvFormat:
    if name not in KV_FORMATS:
        raise ConfigError(f"--kv {name} is none of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]
