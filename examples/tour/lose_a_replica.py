"""Kills the replica that computes an answer, in the middle of it, and shows how the answer goes on: `python
examples/tour/lose_a_replica.py`.

Beside `make up`, with the variables of .penstock/env. The one of the platform's replicas that is busy gets a SIGKILL.
Exit status 0 only when every token came in spite of it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

BODY = {
    "model": "demo",
    "prompt": "The sea is",
    "max_tokens": 120,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
    "return_token_ids": True,
}
KILL_AFTER = 12
"""Tokens of the answer after which a replica is killed."""


def pieces(client: httpx.Client) -> Iterator[tuple[str, int, str]]:
    """The answer as it comes: a piece of text, its number of tokens, and the request's id."""
    with client.stream("POST", "completions", json=BODY) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                yield choice["text"], len(choice.get("token_ids") or []), response.headers["x-penstock-request-id"]


def replicas() -> list[psutil.Process]:
    """Processes of the replicas of the platform that runs with the state folder .penstock here."""
    up = psutil.Process(json.loads(Path(".penstock/state.json").read_text(encoding="utf-8"))["pid"])
    return [
        process
        for process in up.children(recursive=True)
        if any("ServeReplica:pool-" in word for word in words(process))
    ]


def words(process: psutil.Process) -> list[str]:
    """Words of a process' command line; none where it ends just now."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def kill_the_busy_one(before_s: dict[int, float]) -> int:
    """Kill the replica that has computed since; returns its process id. before_s: CPU seconds of each before the
    request."""
    busy = max(replicas(), key=lambda process: cpu_s(process) - before_s[process.pid])
    busy.kill()
    return busy.pid


def main() -> None:
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    before_s = {process.pid: cpu_s(process) for process in replicas()}
    with httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=60, trust_env=False) as client:
        count, request_id, killed = 0, "", None
        for text, num_tokens, request_id in pieces(client):  # noqa: B007  # the id is used below
            print(text, end="", flush=True)
            count += num_tokens
            if killed is None and count >= KILL_AFTER:
                killed = kill_the_busy_one(before_s)
                print(f" [process {killed} killed] ", end="", flush=True)
        (choice,) = client.get(f"receipts/{request_id}").json()["choices"]
    print(f"\n\n{count} of {BODY['max_tokens']} tokens, attempts: {choice['attempts']}")
    raise SystemExit(0 if count == BODY["max_tokens"] and choice["attempts"] == 2 else 1)


if __name__ == "__main__":
    main()
