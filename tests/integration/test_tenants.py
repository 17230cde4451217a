"""Tenants of a running platform, as an operator and as their clients meet them: real Redis, Ray, gateway, HTTP and
command.

The limits' script and what happens without Redis in detail: test_limits.
"""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from typer.testing import CliRunner

from bench.support.platform_process import PlatformProcess, penstock, running_platform
from penstock.cli.main import app
from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Prompts, Scenario, Share
from penstock_loadtest.studies.measure import measure
from tests.integration.waiting import wait_for
from tests.real_time import real_time

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- name: timed
  served_names: [timed, other]
  price_per_hour: 3.6
  replicas: 2
  engine: {{runner: timed, timed: {{base_s: 0.002}}}}
tariffs:
- {{model: other, input: 1.0, output: 4.0}}
"""
BLOCK_SIZE = 16
WITHIN_S = 5.0
SETTINGS_S = 1.0
"""Time within which every gateway applies a change of settings: twice gateway.key_cache_s."""

Record = Callable[[str, object], None]
"""pytest's `record_property`: a figure for the report (`--junitxml`)."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


def run(platform: PlatformProcess, *arguments: str) -> str:
    """Run a command of `penstock`; returns what it prints."""
    result = CliRunner().invoke(app, [*arguments, "--state", str(platform.state)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def new_tenant(platform: PlatformProcess, name: str, *settings: str) -> str:
    """Create a tenant by the command; returns a key of it."""
    run(platform, "tenant", "create", name, *settings)
    return run(platform, "key", "create", name).strip()


def client(platform: PlatformProcess, key: str) -> httpx.Client:
    return httpx.Client(base_url=platform.url, headers={"authorization": f"Bearer {key}"}, timeout=30, trust_env=False)


def body(max_tokens: int = 4, prompt: Any = "What is the capital of France?", **changes: Any) -> dict[str, Any]:
    return {"model": "timed", "prompt": prompt, "max_tokens": max_tokens, "seed": 7, "ignore_eos": True} | changes


def ask(
    platform: PlatformProcess,
    key: str,
    max_tokens: int = 4,
    prompt: Any = "What is the capital of France?",
    **changes: Any,
) -> httpx.Response:
    with client(platform, key) as http:
        return http.post("/v1/completions", json=body(max_tokens, prompt, **changes))


def read_same_usage(
    platform: PlatformProcess, name: str, key: str
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """What the tenant's page and the command say, once they say the same: a page is kept for a second, and what was
    hung up on is charged up to some seconds later."""
    with client(platform, key) as http:
        page = http.get("/v1/usage").json()
    listed = json.loads(run(platform, "usage", "--tenant", name, "--json"))
    rows = [{key: row[key] for key in row if key != "tenant"} for row in listed]
    return (page, listed) if rows == page["data"] else None


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@real_time
def test_a_revoked_key_is_refused_within_a_second_and_what_is_under_way_ends_well(
    platform: PlatformProcess, record_property: Record
) -> None:
    name = f"revoked-{time.monotonic_ns()}"  # another one in each try
    key = new_tenant(platform, name)
    statuses: list[tuple[float, int]] = []
    is_over = threading.Event()

    def keep_asking() -> None:
        with client(platform, key) as http:
            while not is_over.is_set():
                status = http.post("/v1/completions", json=body(1)).status_code
                statuses.append((time.monotonic(), status))

    with (
        client(platform, key) as http,
        http.stream("POST", "/v1/completions", json=body(1500, stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            wait_for(lambda: len(statuses) > 10, within_s=WITHIN_S)
            ids = [entry["id"] for entry in json.loads(run(platform, "key", "list", name, "--json"))]
            assert len(ids) == 1
            assert ids[0] not in key, "an id says nothing about its key"
            begun = time.monotonic()
            run(platform, "key", "revoke", ids[0])
            wait_for(lambda: statuses[-1][1] == 401, within_s=WITHIN_S)
        finally:
            is_over.set()
            asking.join()
        rest = list(lines)

    refused_at = next(at for at, status in statuses if status == 401)
    record_property("revoked_key_refused_s", round(refused_at - begun, 3))
    assert refused_at - begun < 1.0  # twice as long as a key is known without asking (gateway.key_cache_s)
    assert {status for at, status in statuses if at < begun} == {200}
    assert {status for at, status in statuses if at >= refused_at} == {401}
    assert rest[-2:] == ["data: [DONE]", ""]
    assert json.loads(run(platform, "key", "list", name, "--json")) == []
    assert "demo" in run(platform, "key", "list")


async def test_fifty_clients_never_exceed_a_limit_of_a_thousand_tokens_a_minute(
    platform: PlatformProcess, record_property: Record
) -> None:
    key = await asyncio.to_thread(new_tenant, platform, "limited", "--tokens-per-minute", "1000")  # it runs a loop
    answers: list[httpx.Response] = []
    limits = httpx.Limits(max_connections=50)
    headers = {"authorization": f"Bearer {key}"}
    begun = time.monotonic()
    async with httpx.AsyncClient(
        base_url=platform.url, headers=headers, limits=limits, timeout=30, trust_env=False
    ) as http:

        async def keep_asking(number: int) -> None:
            for round_ in range(4):
                prompt = [1000 + number, 2000 + round_, *range(300, 318)]  # 20 tokens, and 30 may come
                answers.append(
                    await http.post(
                        "/v1/completions",
                        json=body(30, prompt, ignore_eos=False, stop_token_ids=[*range(0, 49152, 13)][:256]),
                    )
                )

        await asyncio.gather(*(keep_asking(number) for number in range(50)))
        # all is settled now, and this is more than can be left
        last = await http.post("/v1/completions", json=body(100, [*range(300, 320)]))
    took_s = time.monotonic() - begun

    assert took_s < 60, "one minute's limit is what was given out"
    assert {answer.status_code for answer in answers} == {200, 429}
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    record_property("tokens_of_a_limit_of_1000", used)
    assert 900 < used <= 1000
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
    assert "1000 tokens per minute" in message(refused[0])
    assert all(0 < int(answer.headers["retry-after"]) <= 61 * 5 / 4 + 1 for answer in refused)
    assert {answer.headers["x-ratelimit-limit-tokens"] for answer in answers} == {"1000"}
    assert last.status_code == 429
    assert int(last.headers["x-ratelimit-remaining-tokens"]) == 1000 - used
    assert refused[-1].headers["x-ratelimit-reset-tokens"].endswith("s")
    assert platform.metric("penstock_rate_limited_total", limit="tokens") >= len(refused) > 0


def test_what_an_answer_did_not_use_is_given_back_also_when_the_client_hangs_up(platform: PlatformProcess) -> None:
    key = new_tenant(platform, "gives-back", "--tokens-per-minute", "1000", "--max-parallel", "1")
    prompt = [*range(300, 320)]
    with (
        client(platform, key) as http,
        http.stream("POST", "/v1/completions", json=body(900, prompt, stream=True)) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        second = ask(platform, key, 30, prompt)
        assert second.status_code == 429
        assert "1 sequences at once" in message(second)
        assert second.headers["retry-after"] in {"1", "2"}, "a second, and up to one more at random"

    wait_for(lambda: ask(platform, key, 500, prompt).status_code == 200, within_s=WITHIN_S)


def test_a_request_that_can_never_fit_is_told_so_and_one_without_max_tokens_is_made_to_fit(
    platform: PlatformProcess,
) -> None:
    key = new_tenant(platform, "small", "--tokens-per-minute", "100")

    never = ask(platform, key, 90, [*range(300, 320)])
    assert never.status_code == 400
    assert "110 tokens" in message(never)
    assert "can never fit" in message(never)
    fits = body(1, [*range(300, 320)])
    del fits["max_tokens"]
    with client(platform, key) as http:
        answer = http.post("/v1/completions", json=fits)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 80
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


def test_a_budget_is_spent_to_the_last_request_that_fits_and_no_further(platform: PlatformProcess) -> None:
    """A request of 100 tokens and 50 is 0.0003 by the tariff, one with 12 is 0.000148."""
    key = new_tenant(platform, "budgeted", "--budget", "0.00105")
    prompt = [1000, *range(2000, 2099)]

    def spend(max_tokens: int, **changes: Any) -> httpx.Response:
        return ask(platform, key, max_tokens, prompt, **({"model": "other"} | changes))

    assert [spend(50).status_code for _ in range(3)] == [200] * 3
    refused = spend(50)
    never = spend(400)
    smaller = spend(12)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert message(refused).startswith("The budget of 0.00105 a month is spent: 0.0009")
    assert 0 < int(refused.headers["retry-after"]) <= 31 * 86_400 + 300
    assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
    assert smaller.status_code == 200
    assert spend(400, model="timed").status_code == 200, "what is free is no charge"

    def settled() -> bool:
        return bool(json.loads(run(platform, "tenant", "show", "budgeted", "--json"))["spent"] == 0.001048)

    wait_for(settled, within_s=WITHIN_S)
    with client(platform, key) as http:
        wait_for(lambda: len(http.get("/v1/usage").json()["data"]) == 2, within_s=WITHIN_S)
        page = http.get("/v1/usage").json()
    assert (page["budget"]["amount"], page["budget"]["spent"], page["budget"]["left"]) == (0.00105, 0.001048, 2e-06)
    assert {row["model"]: row["charge"] for row in page["data"]} == {"other": 0.001048, "timed": 0.0}

    run(platform, "tenant", "set", "budgeted", "--budget", "0.0005")
    wait_for(lambda: spend(1).status_code == 429, within_s=WITHIN_S)
    run(platform, "tenant", "set", "budgeted", "--budget", "0.0014")
    wait_for(lambda: spend(50).status_code == 200, within_s=WITHIN_S)


def test_two_tenants_with_the_same_prompt_share_no_block(platform: PlatformProcess) -> None:
    first, second = (new_tenant(platform, name) for name in ("left", "right"))
    prompt = [*range(4000, 4000 + 20 * BLOCK_SIZE)]

    def blocks() -> set[bytes]:
        with redis.Redis.from_url(platform.redis_url) as store:
            return {key for name in store.scan_iter("penstock:prefix:*:blocks") for key in store.smembers(name)}

    found: list[set[bytes]] = [blocks()]
    for key in (first, second):
        answer = ask(platform, key, 1, prompt)
        assert answer.status_code == 200
        assert answer.headers["x-penstock-cached-tokens"] == "0"
        known = found[-1]
        wait_for(lambda known=known: len(blocks() - known) >= 20, within_s=WITHIN_S)  # type: ignore[misc]
        found.append(blocks())
    empty, after_first, after_second = found

    # what earlier tests asked may still arrive
    assert min(len(after_first - empty), len(after_second - after_first)) >= 20, "each has all 20 blocks of its own"
    assert int(ask(platform, first, 1, prompt).headers["x-penstock-cached-tokens"]) == 19 * BLOCK_SIZE, (
        "its own are found"
    )


def test_usage_is_what_the_load_testers_ledger_counted(platform: PlatformProcess, tmp_path: Path) -> None:
    keys = {
        "KEY_A": new_tenant(platform, "tenant-a"),
        "KEY_B": new_tenant(platform, "tenant-b", "--tokens-per-minute", "1000000"),
    }
    prompts = Prompts(source="tokens", tokens=Lengths(constant=24))
    kind = Kind(
        endpoint="completions",
        prompts=prompts,
        output_tokens=Lengths(uniform=(1, 40)),
        ignore_eos=True,
        temperature=0.8,
    )
    scenario = Scenario(
        duration_s=2.0,
        arrivals=Arrivals(process="constant", rate=25),
        kinds=[kind],
        tenants=[Share(name="a", weight=2.0, key_env="KEY_A"), Share(name="b", key_env="KEY_B")],
        cancel=Cancel(share=0.2, after_s=Lengths(uniform=(0.0, 0.05))),
        repeat=4,
        meter=True,
    )
    measured = measure(
        scenario, find_destination(scenario, platform.url, "timed", keys), tmp_path / "run", console=None, plots=False
    )

    assert measured.ledger.is_balanced, measured.ledger.sentences
    assert measured.ledger.ends.get("cancelled", 0) > 0
    totals = {tenant.tenant: tenant for tenant in measured.ledger.tenants}
    for name, key in (("a", keys["KEY_A"]), ("b", keys["KEY_B"])):
        total = totals[name]
        assert total.metered is not None
        assert total.least_metered <= total.metered <= (total.most_metered or 0)
        page, listed = wait_for(partial(read_same_usage, platform, f"tenant-{name}", key), within_s=2 * WITHIN_S)
        assert page["tenant"] == f"tenant-{name}", "a tenant sees its own and no other"
        assert sum(row["completion_tokens"] for row in page["data"]) == total.metered
        assert {row["model"] for row in listed} == {"timed"}
    table = run(platform, "usage")
    assert "tenant-a" in table
    assert "tenant-b" in table


def test_usage_equals_the_load_testers_ledger_where_nobody_hangs_up(platform: PlatformProcess, tmp_path: Path) -> None:
    keys = {"KEY_A": new_tenant(platform, "exact-a"), "KEY_B": new_tenant(platform, "exact-b")}
    prompts = Prompts(source="tokens", tokens=Lengths(uniform=(8, 64)))
    scenario = Scenario(
        duration_s=1.0,
        arrivals=Arrivals(process="constant", rate=30),
        kinds=[Kind(endpoint="completions", prompts=prompts, output_tokens=Lengths(uniform=(1, 30)), ignore_eos=True)],
        tenants=[Share(name="a", weight=2.0, key_env="KEY_A"), Share(name="b", key_env="KEY_B")],
        meter=True,
    )
    measured = measure(
        scenario, find_destination(scenario, platform.url, "timed", keys), tmp_path / "run", console=None, plots=False
    )

    assert measured.ledger.ends == {"finished": 30}
    for total, key in zip(measured.ledger.tenants, (keys["KEY_A"], keys["KEY_B"]), strict=True):
        with client(platform, key) as http:
            rows = http.get("/v1/usage").json()["data"]
        used = [sum(row[field] for row in rows) for field in ("requests", "prompt_tokens", "completion_tokens")]
        assert used == [total.requests, total.prompt_tokens, total.completion_tokens]
        assert min(used) > 0
        assert total.metered == total.completion_tokens


def test_receipts_usage_and_replicas_agree_on_what_requests_cost_also_of_those_that_were_left(
    platform: PlatformProcess,
) -> None:
    key = new_tenant(platform, "payer")
    ids: list[str] = []
    before = platform.metric("penstock_cost_total", kind="requests")
    with client(platform, key) as http:
        for number in range(8):
            ids.append(http.post("/v1/completions", json=body(40, f"Number {number}")).headers["x-request-id"])
        for number in range(4):
            long = body(1500, f"Left {number}", stream=True)
            with http.stream("POST", "/v1/completions", json=long) as response:
                ids.append(response.headers["x-request-id"])
                next(response.iter_lines())

        def sums() -> tuple[float, float]:
            """Costs by receipts and by usage."""
            pages = [http.get(f"/v1/receipts/{each}").json() for each in ids]
            assert all(page["prices"]["places"][0]["per_hour"] == 3.6 for page in pages)
            rows = http.get("/v1/usage").json()["data"]
            return sum(page["cost"] for page in pages), sum(row["cost"] for row in rows)

        wait_for(lambda: sums()[0] == pytest.approx(sums()[1], rel=1e-9), within_s=2 * WITHIN_S)
        paid, _ = sums()
        lines = http.get("/v1/usage?format=csv").text.splitlines()
    paid_by_command = run(platform, "usage", "--tenant", "payer", "--csv").splitlines()

    assert paid > 0.0
    assert sum(float(line.split(",")[8]) for line in lines[1:]) == pytest.approx(paid)
    assert paid_by_command == lines
    wait_for(
        lambda: platform.metric("penstock_cost_total", kind="requests") - before == pytest.approx(paid, rel=0.01),
        within_s=WITHIN_S,
    )


def test_a_tenants_settings_take_effect_and_end_with_it(platform: PlatformProcess) -> None:
    key = new_tenant(platform, "changing", "--models", "other")
    refused = ask(platform, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    with client(platform, key) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["other"]
        assert http.get("/v1/models/timed").status_code == 403

    run(
        platform,
        "tenant",
        "set",
        "changing",
        "--models",
        "*",
        "--requests-per-minute",
        "2",
        "--tier-policy",
        "cloud_first",
    )
    wait_for(lambda: ask(platform, key).status_code == 200, within_s=SETTINGS_S)
    shown = json.loads(run(platform, "tenant", "show", "changing", "--json"))
    assert (shown["models"], shown["requests_per_minute"], shown["tier_policy"]) == (None, 2, "cloud_first")
    assert ask(platform, key).status_code == 200
    limited = ask(platform, key)
    assert limited.status_code == 429
    assert "2 requests per minute" in message(limited)
    assert limited.headers["x-ratelimit-remaining-requests"] == "0"

    run(platform, "tenant", "delete", "changing")
    wait_for(lambda: ask(platform, key).status_code == 401, within_s=SETTINGS_S)
    assert "changing" not in run(platform, "tenant", "list")


def test_the_command_refuses_with_a_sentence(platform: PlatformProcess) -> None:
    run(platform, "tenant", "create", "twice")
    run(platform, "tenant", "create", "gone")
    run(platform, "tenant", "delete", "gone")
    state = str(platform.state)

    for arguments, sentence in (
        (["tenant", "create", "twice"], "already"),
        (["tenant", "create", "gone"], "not used again"),
        (["tenant", "create", "a b"], "a tenant id is"),
        (["tenant", "create", "x", "--tier-policy", "nowhere"], "tier policy must be one of"),
        (["tenant", "show", "nobody"], "there is no tenant 'nobody'"),
        (["tenant", "delete", "demo"], "`penstock up`"),
        (["key", "create", "nobody"], "there is no tenant 'nobody'"),
        (["key", "revoke", "ffffffffffffffffffff"], "no keys have an id"),
    ):
        result = CliRunner().invoke(app, [*arguments, "--state", state])
        assert result.exit_code == 2, arguments
        assert sentence in result.stderr, arguments


def test_while_redis_is_away_a_tenant_with_limits_goes_on_within_them_and_its_usage_is_kept(
    platform: PlatformProcess,
) -> None:
    key = new_tenant(platform, "outage", "--tokens-per-minute", "1000")
    prompt = [*range(300, 320)]
    assert ask(platform, key, 30, prompt).status_code == 200
    (pid,) = platform.redis
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = [ask(platform, key, 180, prompt) for _ in range(6)]
    finally:
        os.kill(pid, signal.SIGKILL)

    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * 4 + [429] * 2, "50 and 4 times 200 are within 1000, a fifth is not"

    def used() -> int:
        with client(platform, key) as http:
            page = http.get("/v1/usage")
            return (
                sum(row["prompt_tokens"] + row["completion_tokens"] for row in page.json()["data"])
                if page.status_code == 200
                else 0
            )

    wait_for(lambda: used() == 850, within_s=15)
    # Redis may have lost the 50 tokens of the last moment before it stopped
    assert ask(platform, key, 190, prompt).status_code == 429, "what was given out meanwhile is charged now"


def test_the_installed_command_speaks_to_the_platform_from_outside(platform: PlatformProcess) -> None:
    done = subprocess.run(
        [*penstock("tenant", "list", "--json", "--state", str(platform.state))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "demo" in {tenant["id"] for tenant in json.loads(done.stdout)}
