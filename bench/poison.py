"""Requests that make an engine's steps raise, or kill its process, among 32 streams of another tenant: does anybody
notice?

    python -m bench.poison [--poisons 50] [--kills 5] [--collisions 7]

A whole platform over real engines on the CPU, with a tiny model (`bench.support.tiny_checkpoint`) in exact mode. No
request is known that makes a step raise, so the replicas are told by marks which ones do (`bench.support.faults`): a
prompt before anything is computed, a logit bias and an adapter when everything has been. First the 32 streams are read
alone; then again and again, until 50 marked requests have come one after another, of every kind by turns. Each must get
a 500 that says why, and every stream the same tokens and text as alone. Then, with three replicas, prompts that kill
the process: each may kill two, and gets a 500 with its id; the streams go on elsewhere, with the same text. At last
such prompts in the moment in which the 32 streams begin, so that many come to a replica with them.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.support.marks import Marks, faulty_replicas
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from bench.support.tenants import make_keys
from bench.support.tiny_checkpoint import write_adapter, write_checkpoint
from penstock.adapters.store import digest_of
from penstock.tenancy.tenants import Settings

MODEL = "tiny"
CONFIG = """
gateway: {{port: {port}, queue_timeout_s: 60}}
pools:
- name: tiny
  model: FOLDER
  served_names: [tiny]
  replicas: REPLICAS
  engine: {{exact: true, threads: 1, kv_memory_bytes: 67108864, max_num_seqs: 40, adapters: {{slots: 2}}}}
"""
NUM_STREAMS = 32
STREAM_TOKENS = 300
POISON_TOKENS = 20
PROMPT_MARK, FATAL_MARK = [666] * 5, [667] * 5
BIAS_MARK = 668
ADAPTER = "poison"
WITHIN_S = 120.0
HEAL_S = 90.0
"""Time within which lost replicas are back, seconds."""
KINDS = ("prompt", "bias", "adapter")
COLLISION_DELAYS_S = (0.0, 0.005, 0.01, 0.02, 0.03)
"""Times from the beginning of the streams to a request that kills, by turns."""


class Answer(NamedTuple):
    """What a stream said, or why it did not."""

    token_ids: tuple[int, ...]
    text: str
    fault: str
    """Status and error, or what is wrong with the end; empty: none."""
    longest_gap_s: float


class Refused(NamedTuple):
    """The answer to a marked request."""

    kind: str
    status: int
    message: str
    request_id: str
    seconds: float


@dataclass
class Seen:
    """What came of one part of the bench."""

    alone: dict[int, Answer] = field(default_factory=dict)
    """Answers without marked requests, by the number of the stream."""
    beside: list[tuple[int, Answer]] = field(default_factory=list)
    marked: list[Refused] = field(default_factory=list)
    lost_by: list[int] = field(default_factory=list)
    """Replicas that each fatal request has killed."""

    @property
    def failed(self) -> list[str]:
        """Streams that failed, with the reason."""
        return [f"stream {number}: {answer.fault}" for number, answer in self.beside if answer.fault]

    @property
    def num_different(self) -> int:
        """Streams that ended well, and said something else than alone."""
        return sum(
            (answer.token_ids, answer.text) != (self.alone[number].token_ids, self.alone[number].text)
            for number, answer in self.beside
            if not answer.fault
        )

    @property
    def longest_gap_s(self) -> float:
        return max((answer.longest_gap_s for _, answer in self.beside), default=0.0)


def stream_body(number: int) -> dict[str, Any]:
    """The request of a stream: greedy, drawn, and drawn with penalties by turns."""
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": number},
        {"temperature": 0.7, "seed": number, "top_p": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    ]
    prompt = [1000 + number, *range(500, 520)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": STREAM_TOKENS} | sampling[number % 3] | STREAM


STREAM: dict[str, Any] = {"stream": True, "ignore_eos": True, "return_token_ids": True}


def marked_body(kind: str, number: int) -> dict[str, Any]:
    """A request that makes steps raise (`prompt`, `bias`, `adapter`) or kills its replica (`fatal`)."""
    tail = [3000 + number, 40, 41]
    body: dict[str, Any] = {"model": MODEL, "prompt": tail, "max_tokens": POISON_TOKENS, "temperature": 0}
    if kind in ("prompt", "fatal"):
        body["prompt"] = [*(PROMPT_MARK if kind == "prompt" else FATAL_MARK), *tail]
    elif kind == "bias":
        body["logit_bias"] = {str(BIAS_MARK): 1}
    else:
        body["model"] = ADAPTER
    return body


class Clients:
    """The innocent tenant and the one with the marked requests."""

    def __init__(self, platform: PlatformProcess, keys: dict[str, str]) -> None:
        self._http = {
            name: httpx.AsyncClient(
                base_url=platform.url,
                headers={"authorization": f"Bearer {key}"},
                timeout=WITHIN_S,
                trust_env=False,
                verify=False,  # no certificates: loading them takes longer than asking
                limits=httpx.Limits(max_connections=None),
            )
            for name, key in keys.items()
        }

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._http.values():
            await client.aclose()

    async def read(self, number: int) -> Answer:
        """One stream from its beginning to its end."""
        pieces: list[tuple[float, bytes]] = []
        try:
            async with self._http["innocent"].stream("POST", "/v1/completions", json=stream_body(number)) as response:
                async for piece in response.aiter_raw():
                    pieces.append((time.perf_counter(), piece))
        except httpx.HTTPError as error:
            return Answer((), "", type(error).__name__, 0.0)
        data = b"".join(piece for _, piece in pieces)
        if response.status_code != 200:
            return Answer((), "", f"{response.status_code} {data[:300]!r}", 0.0)
        gaps = (late - early for (early, _), (late, _) in itertools.pairwise(pieces))
        return parse(data, max(gaps, default=0.0))

    async def send_marked(self, kind: str, number: int) -> Refused:
        begun_s = time.perf_counter()
        response = await self._http["poisoner"].post("/v1/completions", json=marked_body(kind, number))
        error = response.json().get("error") or {}
        request_id = response.headers["x-penstock-request-id"]
        seconds = time.perf_counter() - begun_s
        return Refused(kind, response.status_code, str(error.get("message", "")), request_id, seconds)

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Bring the marked adapter. Raises httpx.HTTPStatusError."""
        parts = [("file", file) for file in files.items()]
        response = await self._http["poisoner"].post("/v1/adapters", data={"name": ADAPTER}, files=parts)
        response.raise_for_status()


def parse(data: bytes, longest_gap_s: float) -> Answer:
    """A stream's answer from its events."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return Answer((), "", f"ended with {lines[-1:]}"[:300], longest_gap_s)
    choices = [choice for line in lines[:-1] for choice in json.loads(line).get("choices", [])]
    token_ids = tuple(token_id for choice in choices for token_id in choice["token_ids"])
    fault = "" if len(token_ids) == STREAM_TOKENS else f"{len(token_ids)} tokens"
    return Answer(token_ids, "".join(choice["text"] for choice in choices), fault, longest_gap_s)


async def run_beside(clients: Clients, work: Callable[[Seen], Any]) -> Seen:
    """All streams alone; then over and over while `work` is done, and to their ends."""
    seen = Seen()
    alone = await asyncio.gather(*map(clients.read, range(NUM_STREAMS)))
    seen.alone = dict(enumerate(alone))
    is_over = asyncio.Event()

    async def keep_reading(number: int) -> None:
        while not is_over.is_set():
            seen.beside.append((number, await clients.read(number)))

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(keep_reading(number))
        await asyncio.sleep(1.0)  # all are in the batch
        try:
            await work(seen)
        finally:
            is_over.set()
    return seen


@contextmanager
def tiny_platform(folder: Path, num_replicas: int) -> Iterator[tuple[PlatformProcess, Path]]:
    """A platform whose replicas fail beside marked sequences, and the folder of the marked adapter."""
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    for each in (checkpoint, adapter):
        each.mkdir()
    write_checkpoint(checkpoint)
    write_adapter(checkpoint, adapter)
    marks = Marks(PROMPT_MARK, BIAS_MARK, digest_of(adapter), FATAL_MARK)
    config = CONFIG.replace("FOLDER", str(checkpoint)).replace("REPLICAS", str(num_replicas))
    with faulty_replicas(marks), running_platform(folder, config) as platform:
        yield platform, adapter


def run_poisons(folder: Path, num_poisons: int, kinds: Sequence[str] = KINDS) -> Seen:
    """One replica, and marked requests one after another."""

    async def main(platform: PlatformProcess, adapter: Mapping[str, bytes]) -> Seen:
        keys = await make_keys(platform, {"innocent": Settings(), "poisoner": Settings()})
        async with Clients(platform, keys) as clients:
            await clients.upload(adapter)

            async def poison(seen: Seen) -> None:
                for number in range(num_poisons):
                    seen.marked.append(await clients.send_marked(kinds[number % len(kinds)], number))

            replicas = platform.replicas
            seen = await run_beside(clients, poison)
            seen.lost_by.append(len(set(replicas) - set(platform.replicas)))
            return seen

    with tiny_platform(folder, 1) as (platform, adapter):
        files = {path.name: path.read_bytes() for path in sorted(adapter.glob("adapter_*"))}
        return asyncio.run(main(platform, files))


def run_kills(folder: Path, num_kills: int) -> Seen:
    """Three replicas, and fatal requests, each when all replicas are there."""

    async def main(platform: PlatformProcess) -> Seen:
        keys = await make_keys(platform, {"innocent": Settings(), "poisoner": Settings()})
        async with Clients(platform, keys) as clients:

            async def kill(seen: Seen) -> None:
                for number in range(num_kills):
                    before = await wait_for_replicas(platform, 3)
                    seen.marked.append(await clients.send_marked("fatal", number))
                    seen.lost_by.append(len(before - set(platform.replicas)))

            return await run_beside(clients, kill)

    with tiny_platform(folder, 3) as (platform, _):
        return asyncio.run(main(platform))


def run_collisions(folder: Path, num_kills: int) -> Seen:
    """Three replicas, and fatal requests that come with the streams: these have no token yet, or just the first."""

    async def main(platform: PlatformProcess) -> Seen:
        keys = await make_keys(platform, {"innocent": Settings(), "poisoner": Settings()})
        seen = Seen()
        async with Clients(platform, keys) as clients:
            seen.alone = dict(enumerate(await asyncio.gather(*map(clients.read, range(NUM_STREAMS)))))
            for number in range(num_kills):
                before = await wait_for_replicas(platform, 3)
                streams = [asyncio.create_task(clients.read(stream)) for stream in range(NUM_STREAMS)]
                await asyncio.sleep(COLLISION_DELAYS_S[number % len(COLLISION_DELAYS_S)])
                seen.marked.append(await clients.send_marked("fatal", number))
                seen.lost_by.append(len(before - set(platform.replicas)))
                seen.beside += enumerate(await asyncio.gather(*streams))
        return seen

    with tiny_platform(folder, 3) as (platform, _):
        return asyncio.run(main(platform))


async def wait_for_replicas(platform: PlatformProcess, count: int) -> set[int]:
    """Process ids of the replicas, when so many are connected. Raises TimeoutError."""
    async with asyncio.timeout(HEAL_S):
        while True:
            ready = await asyncio.to_thread(platform.metric, "penstock_replicas", pool="tiny")
            if ready >= count and len(platform.replicas) >= count:
                return set(platform.replicas)
            await asyncio.sleep(0.2)


def rows_of(name: str, seen: Seen) -> list[Row]:
    slowest = max((refused.seconds for refused in seen.marked), default=0.0)
    return [
        Row(f"{name}: marked requests", len(seen.marked), None, ""),
        Row(f"{name}: of these answered with 500", sum(each.status == 500 for each in seen.marked), None, ""),
        Row(f"{name}: streams beside them", len(seen.beside), None, ""),
        Row(f"{name}: of these failed", len(seen.failed), None, ""),
        Row(f"{name}: of these other text than alone", seen.num_different, None, ""),
        Row(f"{name}: longest gap of a stream", seen.longest_gap_s, None, "s"),
        Row(f"{name}: slowest answer to a marked request", slowest, None, "s"),
        Row(f"{name}: replicas lost, at most by one request", max(seen.lost_by, default=0), None, ""),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--poisons", type=int, default=50)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--collisions", type=int, default=7)
    args = parser.parse_args()
    parts: dict[str, Seen] = {}
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))) for _ in range(3)]
        parts["poison"] = run_poisons(folders[0], args.poisons)
        parts["kill"] = run_kills(folders[1], args.kills)
        parts["collision"] = run_collisions(folders[2], args.collisions)
    rows = [row for name, seen in parts.items() for row in rows_of(name, seen)]
    answers = {f"{each.kind}: {each.status} {each.message[:150]}" for each in parts["poison"].marked}
    write_report("poison", rows, notes=[*sorted(answers), *(fault for seen in parts.values() for fault in seen.failed)])
    is_well = all(
        not seen.failed and not seen.num_different and {each.status for each in seen.marked} <= {500}
        for seen in parts.values()
    )
    most_lost = max([*parts["kill"].lost_by, *parts["collision"].lost_by], default=0)
    return 0 if is_well and most_lost <= 2 and not sum(parts["poison"].lost_by) else 1


if __name__ == "__main__":
    sys.exit(main())
