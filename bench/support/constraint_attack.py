"""Hostile constraints, sent one after another to a platform whose other streams are watched."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.support.hostile_constraints import HOSTILE
from bench.support.hostile_load import InnocentLoad
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.tenants import make_keys
from bench.support.tiny_checkpoint import write_checkpoint
from penstock.tenancy.tenants import Settings
from penstock.wire.frames import Constraint

MODEL = "tiny"
CONFIG = """
gateway: {{port: {port}}}
pools:
- name: tiny
  model: FOLDER
  served_names: [tiny]
  engine: {{threads: 1, kv_memory_bytes: 134217728, max_num_seqs: 40}}
"""
FIELDS = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar", "choice": "guided_choice"}
SETTLE_S = 3.0
MAX_TOKENS = 150
WITHIN_S = 60.0
NUM_SHOWN = 160


class Sent(NamedTuple):
    """What became of one hostile request."""

    name: str
    status: int
    told: str
    """The error's message, or how the answer ended."""
    seconds: float

    @property
    def is_well(self) -> bool:
        """Whether it was refused, answered, or ended by an error that names the limit."""
        return self.status in (200, 400)


class Attacked(NamedTuple):
    """What the attacker got, and the gaps between the tokens of the others' streams, seconds."""

    sent: list[Sent]
    gaps_alone_s: list[float]
    gaps_beside_s: list[float]
    failures: list[str]


def attack(folder: Path, quiet_s: float, num_constraints: int | None = None) -> Attacked:
    """Watch the streams alone for so long, and then beside the constraints."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(checkpoint)
    chosen = dict(list(HOSTILE.items())[:num_constraints])
    with running_platform(folder, CONFIG.replace("FOLDER", str(checkpoint))) as platform:
        return asyncio.run(_attack(platform, quiet_s, chosen))


async def _attack(platform: PlatformProcess, quiet_s: float, chosen: Mapping[str, Constraint]) -> Attacked:
    names = ("streams", "newcomers", "attacker")
    keys = await make_keys(platform, {name: Settings() for name in names})
    load = InnocentLoad(platform.url, MODEL, keys["streams"], keys["newcomers"])
    headers = {"authorization": f"Bearer {keys['attacker']}"}
    sent: list[Sent] = []
    async with (
        httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=WITHIN_S, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(load.run())
        await asyncio.sleep(SETTLE_S)
        alone_s = time.perf_counter()
        await asyncio.sleep(quiet_s)
        begin_s = time.perf_counter()
        for name, constraint in chosen.items():
            sent.append(await _send(http, name, constraint))
        end_s = time.perf_counter()
        await asyncio.sleep(2 * SETTLE_S)  # streams are noted when they have ended
        running.cancel()
    gaps = load.seen.gaps
    return Attacked(
        sent,
        [gap.seconds for gap in gaps if gap.touches(alone_s, begin_s)],
        [gap.seconds for gap in gaps if gap.touches(begin_s, end_s)],
        [failure.what for failure in load.seen.failures],
    )


async def _send(http: httpx.AsyncClient, name: str, constraint: Constraint) -> Sent:
    begun_s = time.perf_counter()
    response = await http.post("/v1/completions", json=body_of(constraint))
    seconds, answer = time.perf_counter() - begun_s, response.json()
    told = answer["error"]["message"] if "error" in answer else answer["choices"][0]["finish_reason"]
    return Sent(name, response.status_code, told[:NUM_SHOWN], seconds)


def body_of(constraint: Constraint) -> dict[str, Any]:
    """A request that asks for an answer that keeps to the constraint. A schema goes as a string, which need not be
    JSON."""
    value = json.loads(constraint.text) if constraint.kind == "choice" else constraint.text
    common = {"model": MODEL, "prompt": "Say it:", "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 1}
    return common | {FIELDS[constraint.kind]: value}
