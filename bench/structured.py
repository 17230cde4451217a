"""Structured output: do answers keep to their schemas, what do masks cost, and does anybody notice hostile constraints?

    python -m bench.structured [--part share|timing|hostile] [--schemas 200] [--steps 400]

share: 200 schemas (`bench.support.json_schemas`), two prompts each, at temperature 0 and 1, through the whole platform
on the demo model: answers that finish within 1,024 tokens, and that validate (`jsonschema`). Wanted: 95 % finish, and
all of these validate.

timing: steps of the demo model with 16 free rows and one that is constrained, beside the same steps with 17 free rows
(rival), each a median and the 99th percentile; the time until the first mask of each schema is there, and CPU time of
the gateway's check. Wanted: a masked token adds at most 1 ms at p99, the first one 20 ms; the free rows lose at most
3 %. Some minutes, in one process; nothing else should run.

hostile: hostile constraints (`bench.support.hostile_constraints`), one after another, beside 16 streams and new
requests of other tenants, through the whole platform on a tiny model. Wanted: a 400, an answer, or an error that names
the limit; the others' gaps stay below 50 ms at p99, and none fails.

Without --part all three, which writes bench/structured.json; a part writes bench/structured_PART.json. Fails (status 1)
where an answer does not validate or a request has an outcome that is not wanted.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from jsonschema import Draft202012Validator, ValidationError

from bench.support.constraint_attack import attack
from bench.support.json_schemas import NUM_SCHEMAS, SchemaTask, make_schemas
from bench.support.mask_timing import MaskBench, StepTimes
from bench.support.platform_process import PlatformProcess, running_platform
from bench.support.report import Row, write_report
from penstock.text.grammar_check import GrammarChecks
from penstock.wire.frames import Constraint

CONFIG = """
gateway: {{port: {port}}}
pools:
- name: demo
  served_names: [demo]
  engine: {{threads: 2, kv_memory_bytes: 800000000, max_num_seqs: 16}}
"""
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 1024
STREAMS = 16
WITHIN_S = 600.0
QUIET_S = 15.0
MAX_NOTES = 12


class Answered(NamedTuple):
    """One answer of the share."""

    name: str
    temperature: float
    prompt: int
    finish_reason: str
    fault: str
    """Why a finished answer does not validate; empty: it does."""
    num_tokens: int


# share


def read_shares(schemas: Sequence[SchemaTask]) -> list[Answered]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_platform(Path(folder), CONFIG) as platform,
    ):
        return asyncio.run(ask_all(platform, schemas))


async def ask_all(platform: PlatformProcess, schemas: Sequence[SchemaTask]) -> list[Answered]:
    waiting = iter(
        [
            (asked, prompt, temperature, number)
            for temperature in TEMPERATURES
            for number, asked in enumerate(schemas)
            for prompt in range(len(asked.prompts))
        ]
    )
    found: list[Answered] = []
    headers = {"authorization": f"Bearer {platform.key}"}
    async with httpx.AsyncClient(base_url=platform.url, headers=headers, timeout=WITHIN_S, trust_env=False) as http:

        async def stream() -> None:
            for asked, prompt, temperature, seed in waiting:
                response = await http.post("/v1/chat/completions", json=body(asked, prompt, temperature, seed))
                found.append(read_answer(asked, prompt, temperature, response))
                print(f"{len(found)} answers", file=sys.stderr, end="\r")

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(stream())
    return found


def body(asked: SchemaTask, prompt: int, temperature: float, seed: int) -> dict[str, Any]:
    schema = {"name": "answer", "strict": True, "schema": asked.schema}
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": asked.prompts[prompt]}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "temperature": temperature,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
    }


def read_answer(asked: SchemaTask, prompt: int, temperature: float, response: httpx.Response) -> Answered:
    told = response.json()
    if response.status_code != 200:
        message = f"{response.status_code} {told['error']['message']}"
        return Answered(asked.name, temperature, prompt, "error", message[:200], 0)
    (choice,) = told["choices"]
    fault = find_fault(choice["message"]["content"], asked.schema) if choice["finish_reason"] == "stop" else ""
    num_tokens = told["usage"]["completion_tokens"]
    return Answered(asked.name, temperature, prompt, choice["finish_reason"], fault, num_tokens)


def find_fault(text: str, schema: dict[str, Any]) -> str:
    """Why an answer does not validate; empty if it does."""
    try:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def share_rows(answers: Sequence[Answered]) -> tuple[list[Row], list[str], bool]:
    rows = []
    for temperature in TEMPERATURES:
        some = [each for each in answers if each.temperature == temperature]
        finished = [each for each in some if each.finish_reason == "stop"]
        at = f"temperature {temperature:g}"
        rows += [
            Row(f"{at}: answers", len(some), None, ""),
            Row(f"{at}: finished within {MAX_TOKENS} tokens (rival: wanted)", percent(finished, some), 95.0, "%"),
            Row(
                f"{at}: of these valid (rival: wanted)",
                percent([each for each in finished if not each.fault], finished),
                100.0,
                "%",
            ),
            Row(f"{at}: tokens of a finished answer, median", median([each.num_tokens for each in finished]), None, ""),
        ]
    faults = [f"{each.name}, temperature {each.temperature:g}: {each.fault}" for each in answers if each.fault]
    unfinished = sorted({each.name for each in answers if each.finish_reason == "length"})
    share = percent([each for each in answers if each.finish_reason == "stop"], answers)
    notes = [f"unfinished: {', '.join(unfinished)}"] if unfinished else []
    return rows, notes + faults[:MAX_NOTES], not faults and share >= 95.0


# timing


def timing_rows(
    schemas: Sequence[SchemaTask], num_steps: int, threads: int | None
) -> tuple[list[Row], list[str], bool]:
    bench = MaskBench(threads)
    rows = []
    for temperature, name in ((0.0, "greedy rows"), (0.8, "rows at temperature 0.8")):
        rows += step_rows(name, bench.time_steps(schemas, temperature, num_steps))
    compiled = [1e3 * seconds for seconds in bench.time_compilation(schemas)]
    rows += quantile_rows("first mask, compilation included, beside 16 rows", compiled, 20.0)
    rows += quantile_rows("gateway's check, CPU time", [1e3 * seconds for seconds in check_seconds(schemas)], 100.0)
    return rows, [f"{len(schemas)} schemas; {num_steps} steps a kind"], True


def step_rows(name: str, times: StepTimes) -> list[Row]:
    masked = [1e3 * (with_mask - free) for with_mask, free in zip(times.masked, times.free, strict=True)]
    same = [1e3 * (again - free) for again, free in zip(times.free_again, times.free, strict=True)]
    lost = 100 * (1 - sum(times.free) / sum(times.masked))
    lost_by_none = 100 * (1 - sum(times.free) / sum(times.free_again))
    return [
        Row(f"{name}: a step with 17 free rows, median", 1e3 * median(times.free), None, "ms"),
        Row(f"{name}: added by a masked row (rival: by none), median", median(masked), median(same), "ms"),
        Row(f"{name}: added by a masked row (rival: by none), p99", quantile(masked, 0.99), quantile(same, 0.99), "ms"),
        Row(f"{name}: what free rows lose beside a masked one (rival: beside none)", lost, lost_by_none, "%"),
        Row(f"{name}: masked tokens a step late, of {len(times.masked)}", times.num_late, None, ""),
        Row(f"{name}: masked answers", times.num_answers, None, ""),
    ]


def quantile_rows(name: str, milliseconds: list[float], wanted: float) -> list[Row]:
    return [
        Row(f"{name}, median", median(milliseconds), None, "ms"),
        Row(f"{name}, p99 (rival: wanted)", quantile(milliseconds, 0.99), wanted, "ms"),
    ]


def check_seconds(schemas: Sequence[SchemaTask]) -> Iterator[float]:
    with contextlib.closing(GrammarChecks()) as checks:
        for asked in schemas:
            checked = checks.check(Constraint("json_schema", json.dumps(asked.schema)))
            if checked.error is not None:
                raise RuntimeError(f"{asked.name} is refused: {checked.error}")
            yield checked.cpu_s


# hostile


def hostile_rows(quiet_s: float, num_constraints: int | None) -> tuple[list[Row], list[str], bool]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        seen = attack(Path(folder), quiet_s, num_constraints)
    by_status = {status: sum(each.status == status for each in seen.sent) for status in (200, 400)}
    wrong = [f"{each.name}: {each.status} {each.told}" for each in seen.sent if not each.is_well]
    rows = [
        Row("hostile constraints", len(seen.sent), None, ""),
        Row("of these refused, or ended by a limit (400)", by_status[400], None, ""),
        Row("of these answered", by_status[200], None, ""),
        Row("with another outcome", len(wrong), None, ""),
        Row("slowest outcome", max(each.seconds for each in seen.sent), None, "s"),
        Row(
            "gap of the others beside them, p99 (rival: alone)",
            1e3 * quantile(seen.gaps_beside_s, 0.99),
            1e3 * quantile(seen.gaps_alone_s, 0.99),
            "ms",
        ),
        Row(
            "gap of the others beside them, longest (rival: alone)",
            1e3 * max(seen.gaps_beside_s),
            1e3 * max(seen.gaps_alone_s),
            "ms",
        ),
        Row("others' requests that failed", len(seen.failures), None, ""),
    ]
    told = [f"{each.name}: {each.status} {each.told}" for each in seen.sent if each.is_well]
    return rows, [*wrong, *seen.failures[:MAX_NOTES], *told], not wrong and not seen.failures


# figures


def percent(some: Sequence[object], of: Sequence[object]) -> float:
    return 100 * len(some) / len(of) if of else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("share", "timing", "hostile"))
    parser.add_argument("--schemas", type=int, default=NUM_SCHEMAS)
    parser.add_argument("--steps", type=int, default=400, help="steps of each kind, at each temperature")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine, in the timing part")
    parser.add_argument("--quiet-s", type=float, default=QUIET_S, help="seconds of the streams alone")
    parser.add_argument("--constraints", type=int, help="so many hostile constraints, instead of all")
    args = parser.parse_args()
    schemas = make_schemas(args.schemas)
    parts: dict[str, Callable[[], tuple[list[Row], list[str], bool]]] = {
        "share": lambda: share_rows(read_shares(schemas)),
        "timing": lambda: timing_rows(schemas, args.steps, args.threads),
        "hostile": lambda: hostile_rows(args.quiet_s, args.constraints),
    }
    rows: list[Row] = []
    notes: list[str] = []
    is_well = True
    for name, run in parts.items():
        if args.part not in (None, name):
            continue
        begun_s = time.monotonic()
        more_rows, more_notes, is_part_well = run()
        rows += more_rows
        notes += [*more_notes, f"{name}: {time.monotonic() - begun_s:.0f} s"]
        is_well = is_well and is_part_well
    write_report("structured", rows, notes=notes, variant=args.part or "")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
