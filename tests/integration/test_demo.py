"""The platform on the demo model, as a tenant meets it: the unmodified `openai` client, mixed traffic, prefix reuse,
hanging up."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from bench.prefix import CONFIG, SYSTEM_TOKENS, cached, share_a_prompt
from bench.support.loopback import ChatClient
from bench.support.platform_process import PlatformProcess, running_platform
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

REPORT_S = 10.0
"""Ample for a replica's report to reach /metrics, which lags by up to 0.04 s; how soon exactly is test_serve_apps'
affair."""
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


def test_the_openai_client_gets_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=PARIS, temperature=0, max_tokens=16)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_openai_client_streams_paris(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=PARIS,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens >= text.count(" ")


async def ask(client: openai.AsyncOpenAI, number: int) -> list[str]:
    """One of eight kinds of request; returns the finish reasons of its choices."""
    question: list[Any] = [{"role": "user", "content": f"Number {number}: say something about the number {number}."}]
    size = 4 + number % 13
    match number % 8:
        case 0:
            return await _finishes(
                client.chat.completions.create(
                    model="demo", messages=question, max_tokens=size, temperature=0, stream=True
                )
            )
        case 1:
            return await _finishes(
                client.chat.completions.create(
                    model="demo", messages=question, max_tokens=size, seed=number, stream=True
                )
            )
        case 2:
            chat = await client.chat.completions.create(
                model="demo", messages=question, max_tokens=size, n=2, top_p=0.9
            )
        case 3:
            chat = await client.chat.completions.create(
                model="demo", messages=question, max_tokens=size, logprobs=True, top_logprobs=3
            )
        case 4:
            chat = await client.chat.completions.create(
                model="demo", messages=question, max_tokens=size, stop=["number", "."]
            )
        case 5:
            chat = await client.chat.completions.create(
                model="demo", messages=question, max_tokens=size, frequency_penalty=1, presence_penalty=0.5
            )
        case 6:
            text = await client.completions.create(
                model="demo", prompt=f"{number} and {number + 1} make", max_tokens=size, temperature=0
            )
            return [choice.finish_reason for choice in text.choices]
        case _:
            chat = await client.chat.completions.create(
                model="demo", messages=question, max_tokens=size, extra_body={"top_k": 5, "min_p": 0.05}
            )
    return [choice.finish_reason for choice in chat.choices]


async def _finishes(pending: Any) -> list[str]:
    chunks: AsyncIterator[Any] = await pending
    return [choice.finish_reason async for chunk in chunks for choice in chunk.choices if choice.finish_reason]


async def test_64_concurrent_mixed_requests_all_finish(platform: PlatformProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=200
    ) as client:
        finishes = await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert [len(found) for found in finishes] == [2 if number % 8 == 2 else 1 for number in range(64)]
    assert {finish for found in finishes for finish in found} <= {"stop", "length"}
    wait_for(lambda: platform.metric("penstock_running_sequences") == 0, within_s=REPORT_S)


def test_chats_that_share_a_system_prompt_find_it_cached_and_start_three_times_sooner(
    platform: PlatformProcess, record_property: Callable[[str, object], None]
) -> None:
    client = ChatClient(platform.url, "demo", platform.key, extra={"temperature": 0})
    with asyncio.Runner() as loop:
        reuse = loop.run(share_a_prompt(client, seed=time.time_ns(), chats=20))
        client.close()

    assert cached(reuse.cold) < 100
    assert all(cached(answer) >= 0.9 * SYSTEM_TOKENS for answer in reuse.warm)
    warm_s = statistics.median(answer.ttft_s for answer in reuse.warm)
    record_property("ttft_cold_and_warm_s", [round(reuse.cold.ttft_s, 3), round(warm_s, 3)])
    assert warm_s <= reuse.cold.ttft_s / 3


def test_a_client_that_hangs_up_frees_its_kv(platform: PlatformProcess) -> None:
    free = platform.metric("penstock_kv_blocks_free")
    body = {"model": "demo", "messages": PARIS, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {platform.key}"}
    with httpx.stream(
        "POST", f"{platform.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False
    ) as response:
        lines = response.iter_lines()  # held: an iterator that is dropped closes the connection
        next(lines)
        wait_for(lambda: platform.metric("penstock_running_sequences") == 1, within_s=REPORT_S)

    def is_free() -> bool:
        return platform.metric("penstock_running_sequences") == 0 and platform.metric("penstock_kv_blocks_free") >= free

    wait_for(is_free, within_s=REPORT_S)
