"""The field's terms, one spelling everywhere: names that were private words do not come back."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.shape import read_sources

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "adapted": "adapter_models",
    "choose": "sample",
    "flow": "traffic",
    "gateway": "dependencies",
    "generate": "endpoint",
    "hand": "serve_agent",
    "int4": "quantized",
    "leaving": "drain",
    "members": "discovery",
    "meters": "request_metrics",
    "pieces": "text_assembly",
    "products": "matmul",
    "reach": "candidates",
    "served": "served_model",
    "spread": "adapter_placement",
    "surface": "asgi",
}
"""Names that no module has, each with what to call it."""
IDENTIFIERS = {
    "Answerer": "AnsweringModel",
    "Ask": "LimitRequest, ProviderRequest",
    "Asked": "ResponseMeta",
    "Book": "LimitLedger",
    "Considered": "RouteAttempt",
    "Debt": "UnsettledUsage",
    "Draws": "SamplingInputs",
    "Groups": "QuantizedTensor",
    "HAND_APP": "SERVE_AGENT_APP",
    "HAND_RESOURCE": "SERVE_AGENT_RESOURCE",
    "Hand": "ServeAgent",
    "Heard": "AgedReport",
    "Int4Matrix": "TorchQuantizedMatrix",
    "Members": "ReplicaDiscovery",
    "Other": "LazyPrompt",
    "Outlook": "RouteForecast",
    "Placed": "ServeState",
    "Reach": "Candidates, ServeControl",
    "Reading": "TokenizedPrompt",
    "Readings": "LazyPrompts",
    "Remote": "ReplicaClient",
    "Said": "ProviderEvent",
    "Told": "AdapterControl",
    "_Look": "_RouteState",
    "_attend": "_reconcile_pool",
    "_hear": "_read_reports",
    "_see": "_read_replicas",
    "guess": "propose",
    "look": "reconcile",
    "reach_of": "find_candidates",
    "take_best": "greedy_tokens",
}
"""Names that nothing has, each with what to call it."""


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Every name that is defined, used, imported or passed by keyword."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=alias):
                yield from name.split(".")
                if alias is not None:
                    yield alias


def test_no_module_has_a_private_word_for_a_name() -> None:
    sources = [source for source in read_sources(ROOT) if source.path.parts[0] in ("platform", "loadtest")]

    assert len(sources) > 300
    assert [str(source.path) for source in sources if source.path.stem in MODULES] == []


def test_nothing_has_a_private_word_for_a_name() -> None:
    found = {
        f"{source.path}: {name} (call it {IDENTIFIERS[name]})"
        for source in read_sources(ROOT)
        for name in identifiers(ast.parse(source.text))
        if name in IDENTIFIERS
    }

    assert found == set()
