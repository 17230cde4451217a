"""The pool that a plan proposes, as values of the chart: `penstock plan --helm`."""

import re

import yaml

from penstock.base.errors import ConfigError
from penstock.cli.plan.make import Plan
from penstock.perf.planning.choice import Option
from penstock.perf.planning.formats import WeightFormat

MAX_NAME = 24
"""Characters of a pool's name, as the chart allows."""
GIB = 2**30


def render_values(plan: Plan) -> str:
    """YAML of `pools` and, for a hub id, `models`. Raises ConfigError where nothing serves."""
    option = plan.best
    if option is None or option.replicas is None:
        raise ConfigError(f"nothing serves {plan.found.shape.name} within what was asked, so there is no pool")
    values: dict[str, object] = {"pools": [make_pool(plan, option)]}
    if _is_hub_id(plan.found.model):
        values["models"] = {"download": True, "cacheSize": f"{_gib(_weights(option) * option.place.parts) + 10}Gi"}
    head = (
        f"# {plan.found.shape.name} on {option.place.parts} {option.place.name} each, weights in {option.form.name}: "
        f"{_checkpoint(option.form)}.\n# Written by penstock plan --helm.\n"
    )
    return head + yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def make_pool(plan: Plan, option: Option) -> dict[str, object]:
    question, is_gpu = plan.question, option.place.name != "this machine"
    engine: dict[str, object] = {
        "device": "cuda" if is_gpu else "cpu",
        "kv_memory_bytes": "auto",
        "memory_share": question.memory_share,
        "max_model_len": question.context_tokens,
    }
    if option.kv.bytes_each == 1:
        engine["kv_dtype"] = option.kv.name
    if option.place.parts > 1:
        engine["tensor_parallel_size"] = option.place.parts
    if option.bounds is not None and question.max_num_seqs is not None:
        engine["max_num_seqs"] = question.max_num_seqs
    if question.max_batched_tokens is not None:
        engine["max_batched_tokens"] = question.max_batched_tokens
    engine["adapters"] = {"slots": question.adapter_slots, "max_rank": question.adapter_rank}
    if question.draft is not None:
        engine["speculation"] = {"method": "draft", "model": question.draft}
    elif question.draft_head is not None:
        engine["speculation"] = {"method": "head", "head": question.draft_head}
    own = option.memory.total_bytes - option.memory.reserve_bytes
    memory = _gib(own) if not is_gpu else _gib(_weights(option)) // 2 + 8
    return {
        "name": pool_name(plan.found.shape.name),
        "model": plan.found.model,
        "served_names": [plan.found.shape.name.lower()],
        "tier": "cloud" if is_gpu else "edge",
        "replicas": option.replicas,
        "engine": engine,
        "pod": {
            "resources": {"requests": {"cpu": "2", "memory": f"{memory}Gi"}, "limits": {"memory": f"{memory + 4}Gi"}}
        },
    }


def pool_name(name: str) -> str:
    """A name that the chart takes: lower case letters, digits, dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"pool-{plain}"
    return plain[:MAX_NAME].strip("-")


def _weights(option: Option) -> int:
    """Bytes of the weights on one card."""
    names = ("weights", "scales", "embedding, head", "norms, biases")
    return sum(line.num_bytes for line in option.memory.lines if line.name in names)


def _gib(num_bytes: int) -> int:
    return -(-num_bytes // GIB)


def _checkpoint(form: WeightFormat) -> str:
    return f"name a checkpoint that has them ({form.checkpoint})"


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))
