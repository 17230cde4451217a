"""Records as a real run would leave them: several tenants, a server that stalls, queues, sheds and breaks, replicas
that come and go."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock_loadtest.results.records import Record, RecordWriter
from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario, Share, Targets

TENANTS = {"acme": 5.0, "initech <beta>": 3.0, "umbrella": 1.5, "hooli": 0.5}
SCENARIO = Scenario(
    name="evening peak",
    duration_s=120.0,
    warmup_s=5.0,
    arrivals=Arrivals(process="gamma", rate=20.0, cv=1.5),
    kinds=[
        Kind(
            name="chat",
            weight=3.0,
            output_tokens=Lengths(lognormal=(48, 300)),
            prompts=Prompts(shared_prefix_tokens=200),
        ),
        Kind(name="documents", endpoint="completions", prompts=Prompts(tokens=Lengths(uniform=(800, 2000)))),
    ],
    tenants=[Share(name=name, weight=weight) for name, weight in TENANTS.items()],
    targets=Targets(ttft_s=1.0, tpot_s=0.06),
)
_SLOTS = 40  # requests a replica serves at once
_STALL = (70.0, 73.0)


def ready_replicas(at_s: float, duration_s: float) -> int:
    """One, then three, then one again."""
    return 3 if 0.3 * duration_s <= at_s < 0.8 * duration_s else 1


def simulate(scenario: Scenario = SCENARIO, *, seed: int = 0) -> list[Record]:
    """Requests to `3 x _SLOTS` servers of one queue each, in the order they end."""
    rng = random.Random(seed)
    duration_s = scenario.duration_s or 60.0
    free_s = [0.0] * (3 * _SLOTS)
    records, at_s = [], 0.0
    while True:
        at_s += rng.gammavariate(1 / scenario.arrivals.cv**2, scenario.arrivals.cv**2 / scenario.arrivals.rate)
        if at_s >= duration_s:
            return sorted(records, key=lambda record: record.end_s or 0.0)
        records.append(
            _request(len(records), round(at_s, 6), free_s[: _SLOTS * ready_replicas(at_s, duration_s)], free_s, rng)
        )


def _request(index: int, at_s: float, ready: Sequence[float], free_s: list[float], rng: random.Random) -> Record:
    slot = min(range(len(ready)), key=lambda place: ready[place])
    kind = "chat" if rng.random() < 0.75 else "documents"
    prompt = rng.randint(220, 600) if kind == "chat" else rng.randint(800, 2000)
    facts = {
        "index": index,
        "intended_s": at_s,
        "sent_s": round(at_s + rng.expovariate(2000), 6),
        "tenant": rng.choices(list(TENANTS), list(TENANTS.values()))[0],
        "kind": kind,
        "model": "small",
        "endpoint": "chat" if kind == "chat" else "completions",
        "request_id": f"req_{rng.getrandbits(48):012x}",
        "wanted_tokens": 64,
    }
    start_s = _after_stall(max(at_s, free_s[slot]))
    if start_s - at_s > 4.0:
        end_s = round(at_s + 0.004, 6)
        return msgspec.convert(
            facts
            | {
                "end_s": end_s,
                "outcome": "shed",
                "status": 429,
                "error": "429: the queue is longer than the deadline.",
            },
            Record,
        )
    replica = slot // _SLOTS
    facts |= {
        "tier": "gpu" if replica < 2 else "cpu",
        "replica": f"small-{replica}",
        "status": 200,
        "prompt_tokens": prompt,
        "tokens_from": "ids",
    }
    facts |= {
        "cached_tokens": 192 if kind == "chat" and rng.random() < 0.8 else 0,
        "predicted_ttft_s": round(0.08 + max(start_s - at_s, 0) * 0.8, 6),
    }
    return msgspec.convert(facts | _answer(facts["intended_s"], start_s, slot, free_s, prompt, rng), Record)


def _answer(
    at_s: float, start_s: float, slot: int, free_s: list[float], prompt: int, rng: random.Random
) -> dict[str, object]:
    wanted = min(int(rng.lognormvariate(3.5, 0.7)) + 1, 200)
    pace_s = (0.022 if slot < 2 * _SLOTS else 0.045) * rng.uniform(0.8, 1.3)
    times = [start_s + 0.03 + prompt * 0.00012 * rng.uniform(0.7, 1.5)]
    while len(times) < wanted:
        times.append(_after_stall(times[-1] + rng.gammavariate(6, pace_s / 6)))
    fate = rng.random()
    if fate < 0.01:
        times = times[: len(times) // 2 + 1]
    chunk_s = [round(time, 6) for time in times]
    end_s = free_s[slot] = chunk_s[-1] + 0.001
    common = {
        "first_s": chunk_s[0],
        "chunk_s": chunk_s,
        "chunk_tokens": [2 if rng.random() < 0.05 else 1 for _ in chunk_s],
        "end_s": round(end_s, 6),
    }
    common["tokens"] = sum(common["chunk_tokens"])
    if fate < 0.01:
        return common | {"outcome": "failed", "error": "The connection was closed in the middle of the stream."}
    return common | ({"outcome": "cancelled"} if fate < 0.04 else {"outcome": "finished", "finish_reason": "stop"})


def _after_stall(at_s: float) -> float:
    return _STALL[1] + (at_s - _STALL[0]) * 0.05 if _STALL[0] <= at_s < _STALL[1] else at_s


def write_folder(
    folder: Path, records: Sequence[Record], scenario: Scenario = SCENARIO, *, is_killed: bool = False
) -> Path:
    """What a run leaves; `is_killed`: before its ledger, in the middle of a line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.json").write_text(json.dumps(msgspec.to_builtins(scenario, enc_hook=str)), encoding="utf-8")
    with RecordWriter(folder / "records.jsonl") as writer:
        for record in records:
            writer.write(record)
    if is_killed:
        with (folder / "records.jsonl").open("ab") as file:
            file.write(b'{"index": 99, "inten')
        return folder
    duration_s = scenario.duration_s or 60.0
    samples = [
        {
            "t_s": float(t),
            "replicas": {
                "small/gpu": min(ready_replicas(t, duration_s), 2),
                "small/cpu": ready_replicas(t, duration_s) // 3,
            },
        }
        for t in range(int(duration_s))
    ]
    (folder / "observed.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    (folder / "run.json").write_text(
        '{"ended": "2030-01-02T03:04:05+00:00", "is_interrupted": false}', encoding="utf-8"
    )
    verdict = {
        "is_balanced": True,
        "sentences": [f"The ledger balances: each of {len(records):,} accepted requests ended in exactly one way."],
    }
    (folder / "ledger.json").write_text(json.dumps(verdict), encoding="utf-8")
    return folder
