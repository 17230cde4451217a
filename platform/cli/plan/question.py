"""What `penstock plan` is asked, and how its options are read."""

import math
import re
from dataclasses import dataclass

from penstock.base.errors import ConfigError
from penstock.perf.planning.formats import FORMATS, KV_FORMATS, KvFormat, WeightFormat
from penstock.perf.planning.loads import Load, Targets

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_UNITS = {"ms": 1e-3, "s": 1.0}
THIS_MACHINE = "cpu"
"""Name of `--gpu` for the machine that the command runs on."""


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
        if not 0 < self.utilisation <= 1:
            raise ConfigError(f"--utilisation is a part above 0, at most 1, not {self.utilisation:g}")
        if self.margin < 0:
            raise ConfigError(f"--margin can't be negative, like {self.margin:g}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"--memory-share is a part above 0, at most 1, not {self.memory_share:g}")
        if self.count is not None and self.count < 1:
            raise ConfigError(f"--count must be at least 1, not {self.count}")
        whole = self.load.prompt_tokens + self.load.cached_tokens + self.load.output_tokens
        if whole > self.context_tokens:
            raise ConfigError(
                f"a request of {whole:.0f} tokens, prompt and output, is longer than --context {self.context_tokens}"
            )


def parse_duration(text: str) -> float:
    """Seconds of `50ms` or `1.5s`. Raises ConfigError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]) > 0:
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


def parse_form(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise ConfigError(f"--weights {name} is none of {', '.join(FORMATS)}")
    return FORMATS[name]


def parse_kv(name: str) -> KvFormat:
    if name not in KV_FORMATS:
        raise ConfigError(f"--kv {name} is none of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]
