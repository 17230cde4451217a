"""aiperf (PyPI, NVIDIA; read and run here: 0.13.0) as the rival of our load tester: how it is given a load, and how its
export is read.

Its words and ours. Its `time_to_first_token` runs from just before it hands a request to its HTTP client to the first
chunk with content, a new connection's set-up included; ours (`Record.ttft_s`) from the intended time, so what is
compared is ours from `sent_s`. Its `inter_token_latency` is (last - first chunk with content) / (tokens by usage - 1):
our TPOT where the first chunk holds one token. Its throughput is output tokens / (last chunk with content - first
request's start): the same sum is made of both testers' records here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

EXPORT = "profile_export.jsonl"
"""Name of its file of requests, in the folder that the configuration names."""
TICKS = 200.0
"""Times a second at which aiperf checks whether one more request may leave; half a tick passes on average, 2.5 ms."""


class Load(NamedTuple):
    """The load of both testers: so many streamed chats, evenly spaced or so many at once, each from a prompt of
    its own."""

    name: str
    requests: int
    output_tokens: int
    prompt_words: int = 100
    rate: float | None = None
    """Requests a second; None: `at_once` at a time."""
    at_once: int = 1


class Seen(NamedTuple):
    """A finished request as one tester saw it, in seconds on that tester's clock."""

    sent_s: float
    last_s: float
    """Arrival of the last token."""
    ttft_s: float
    """Seconds from `sent_s` to the first token."""
    tpot_s: float
    tokens: int


class _Metric(msgspec.Struct):
    value: float
    unit: str


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int


class _Metrics(msgspec.Struct):
    time_to_first_token: _Metric
    inter_token_latency: _Metric
    output_sequence_length: _Metric


class _Line(msgspec.Struct):
    metadata: _Metadata
    metrics: msgspec.Raw
    error: dict[str, object] | None = None


_decoder = msgspec.json.Decoder(_Line)


def configuration(
    load: Load, *, url: str, model: str, prompts: Path, tokenizer: Path, folder: Path, fields: Mapping[str, object]
) -> dict[str, object]:
    """Content of aiperf's configuration file (JSON is YAML). `prompts`: JSON lines with `text`, sent in order;
    `fields`: further fields of every request's body.

    The key comes from OPENAI_API_KEY when it starts. One worker, because it shares two cores with the server. A number
    of concurrent requests is asked for as a rate of TICKS that a cap holds back: the loop that issues requests in its
    `concurrency` phases never sleeps and would take a core from the server.
    """
    pace: dict[str, object] = (
        {"rate": load.rate} if load.rate is not None else {"rate": TICKS, "concurrency": load.at_once}
    )
    return {
        "schemaVersion": "2.0",
        "randomSeed": 1,
        "benchmark": {
            "model": model,
            "endpoint": {
                "url": url,
                "type": "chat",
                "streaming": True,
                "api_key": "${OPENAI_API_KEY}",
                "use_server_token_count": True,
                "extra": {"max_tokens": load.output_tokens, **fields},
            },
            "dataset": {"type": "file", "path": str(prompts), "format": "single_turn", "sampling": "sequential"},
            "phases": [{"name": "profiling", "type": "constant", "requests": load.requests, **pace}],
            "tokenizer": {"name": str(tokenizer)},
            "artifacts": {"dir": str(folder), "summary": ["json"], "records": ["jsonl"]},
            "gpu_telemetry": {"enabled": False},
            "server_metrics": {"enabled": False},
            "runtime": {"workers": 1, "record_processors": 1, "ui": "none"},
        },
    }


def read_export(path: Path) -> list[Seen]:
    """The requests of an export, in the order it wrote them. Raises RuntimeError when one failed or has no times of
    tokens."""
    return [_seen(line, f"{path.name}, line {number}") for number, line in enumerate(path.read_bytes().splitlines(), 1)]


def _seen(text: bytes, place: str) -> Seen:
    try:
        line = _decoder.decode(text)
        if line.error is not None:
            raise RuntimeError(f"{place}: aiperf says that the request failed: {line.error}")
        metrics = msgspec.json.decode(line.metrics, type=_Metrics)
    except msgspec.DecodeError as error:
        raise RuntimeError(f"{place} is not what aiperf 0.13 exports: {error}") from None
    if metrics.time_to_first_token.unit != "ms" or metrics.inter_token_latency.unit != "ms":
        raise RuntimeError(f"{place}: times are not in ms")
    return Seen(
        sent_s=line.metadata.request_start_ns / 1e9,
        last_s=line.metadata.request_end_ns / 1e9,
        ttft_s=metrics.time_to_first_token.value / 1e3,
        tpot_s=metrics.inter_token_latency.value / 1e3,
        tokens=round(metrics.output_sequence_length.value),
    )
