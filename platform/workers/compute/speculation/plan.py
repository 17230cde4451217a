"""The draft model or head that a pool names, read from its headers and checked against the target; no weights."""

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.text.source import DEMO, ModelSource, resolve
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.speculation.head_file import DraftHead, read_head
from penstock.workers.config import EngineConfig

DEMO_HEAD = Path(__file__).with_name("demo-head.safetensors")
"""The head that comes with Penstock, for the demo model; a head by the name of `demo`."""

_ENCODING = re.compile(r"[.-](T?Q\d\w*|IQ\d\w*|BF16|F16|F32)$", re.IGNORECASE)
"""What a GGUF's file name says last: how its weights are encoded. The model is the same."""

_log = logging.getLogger("penstock.speculation")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    source: ModelSource
    whole: ModelConfig
    """The checkpoint's own configuration."""
    config: ModelConfig
    """The configuration that drafts: perhaps with the first layers only."""
    is_target: bool
    """Whether the draft model is the target's own checkpoint, so that weights are shared."""


def plan_draft(target: ModelSource, target_config: ModelConfig, config: EngineConfig) -> DraftPlan | None:
    """Plan the draft model that the configuration names. Returns None if it names none. Raises ConfigError if the model
    can't draft for this target."""
    speculation = config.speculation
    if speculation.model is None:
        return None
    source = resolve(speculation.model)
    is_target = source.path == target.path
    whole = target_config if is_target else read_config(source)
    if not is_target:
        _check_vocabulary(source, whole, target, target_config)
    num_layers = speculation.draft_layers or whole.num_layers
    if num_layers > whole.num_layers:
        raise ConfigError(
            f"engine.speculation.draft_layers is {num_layers}, "
            f"and {speculation.model} has only {whole.num_layers} layers"
        )
    return DraftPlan(source, whole, replace(whole, num_layers=num_layers), is_target)


def plan_head(
    target: ModelSource, target_config: ModelConfig, config: EngineConfig, *, is_fused: bool, has_kernels: bool
) -> DraftHead | None:
    """The draft head that the configuration names, which fits the model. is_fused: whether the CPU kernels are to serve
    the model. has_kernels: whether this machine has them. Returns None if it names none, and, with a warning, where
    there are no kernels: answers are the same without. Raises ConfigError."""
    name = config.speculation.head
    if name is None:
        return None
    if not is_fused and not has_kernels and config.device == "cpu" and not config.exact and config.dtype != "float32":
        _log.warning(
            "Nothing is drafted by a head, and drafts are looked up alone: "
            "a head needs the CPU kernels, which this machine does not have."
        )
        return None
    if not is_fused:
        raise ConfigError(
            "engine.speculation.method: head needs the CPU kernels, which don't serve this pool: not with exact, "
            "dtype: float32, tensor_parallel_size or device: cuda; take draft or ngram"
        )
    path = DEMO_HEAD if name == DEMO else Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"engine.speculation.head: there is no file {path}")
    head = read_head(path)
    head.spec.check_fits(target_config)
    if _ENCODING.sub("", head.spec.target) != _ENCODING.sub("", target.name):
        _log.warning(
            "The draft head was trained for %s; %s may agree with it less often.", head.spec.target, target.name
        )
    return head


def _check_vocabulary(
    source: ModelSource, config: ModelConfig, target: ModelSource, target_config: ModelConfig
) -> None:
    """A proposal is a token id, which must mean the same to both models. Raises ConfigError."""
    if config.vocab_size != target_config.vocab_size:
        raise ConfigError(
            f"the draft model {source.name} has a vocabulary of {config.vocab_size} tokens, "
            f"and {target.name} one of {target_config.vocab_size}; they must be the same"
        )
    from penstock.text.vocabulary import load_vocabulary  # noqa: PLC0415 (only this needs tokenizers in a replica)

    if load_vocabulary(source).raw.get_vocab() != load_vocabulary(target).raw.get_vocab():
        raise ConfigError(
            f"the draft model {source.name} and {target.name} number their tokens differently; "
            "their vocabularies must be the same"
        )
