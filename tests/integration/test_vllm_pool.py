"""A pool that vLLM serves beside one of our own engine: real Ray, Redis, replicas and vLLM, the unmodified `openai`
client.

vLLM lives in an environment of its own; PENSTOCK_VLLM_PYTHON names its interpreter (docs/vllm.md).
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from bench.support.cpu import is_alive
from bench.support.platform_process import PlatformProcess, running_platform
from bench.vllm_pool import CONFIG, MODELS, START_S, bridges, config, shape
from penstock.adapters.peft import FILES
from penstock.text.source import resolve
from tests.integration.waiting import wait_for
from tests.unit.workers.adapter_files import write_adapter

if not os.environ.get("PENSTOCK_VLLM_PYTHON"):
    pytest.skip("PENSTOCK_VLLM_PYTHON names no interpreter with vLLM", allow_module_level=True)

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
COUNT: list[Any] = [{"role": "user", "content": "Count from one to two hundred in words."}]
HEAL_S = 300.0
"""vLLM takes a minute to start, more on a busy machine."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    text = CONFIG.replace("{port}", "{port}, queue_timeout_s: 5")  # a lost replica's successor takes longer
    with running_platform(tmp_path_factory.mktemp("platform"), text, start_s=START_S) as running:
        yield running


@pytest.fixture
def client(platform: PlatformProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=300) as client:
        yield client


def test_an_interpreter_without_vllm_is_told_at_the_start(tmp_path: Path) -> None:
    pool = f"{{name: vllm, model: demo, engine: {{runner: vllm, threads: 1, vllm: {{python: {sys.executable}}}}}}}"

    with pytest.raises(RuntimeError, match="No module named 'vllm'"), running_platform(tmp_path, config(pool)):
        pass


def test_both_engines_know_paris_in_answers_of_one_shape(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model=model, messages=PARIS, temperature=0, max_tokens=32, logprobs=True, top_logprobs=3
        ).model_dump()
        for model in MODELS
    ]

    for answer in answers:
        (choice,) = answer["choices"]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
        assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]), (
            "the end of sequence is a token too, and has its entry"
        )
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert shape(answers[0]) == shape(answers[1])
    ours, theirs = (answer["choices"][0]["logprobs"]["content"][0] for answer in answers)
    assert ours["token"] == theirs["token"]
    assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=0.1)


def test_streams_have_one_shape_and_tokens_come_as_they_are_made(client: openai.OpenAI) -> None:
    found = []
    for model in MODELS:
        begin = time.monotonic()
        stream = client.chat.completions.create(
            model=model,
            messages=COUNT,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [(time.monotonic() - begin, chunk) for chunk in stream]
        text = [at for at, chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
        assert len(text) > 10
        assert text[len(text) // 2] < text[-1]
        assert chunks[-1][1].usage is not None
        assert chunks[-1][1].usage.completion_tokens == 40
        assert [chunk.choices[0].finish_reason for _, chunk in chunks if chunk.choices][-1] == "length"
        found.append([shape(chunk.model_dump()) for _, chunk in (chunks[0], chunks[1], chunks[-1])])

    assert found[0] == found[1]


@pytest.mark.parametrize("model", MODELS)
def test_stop_strings_stop_tokens_and_bounds_end_an_answer(client: openai.OpenAI, model: str) -> None:
    stopped = client.chat.completions.create(model=model, messages=PARIS, temperature=0, max_tokens=32, stop=[" is"])
    bounded = client.completions.create(
        model=model, prompt="One two three", temperature=0, max_tokens=5, extra_body={"ignore_eos": True}
    )
    several = client.chat.completions.create(model=model, messages=PARIS, temperature=0.9, seed=3, max_tokens=8, n=3)

    assert stopped.choices[0].finish_reason == "stop"
    assert " is" not in (stopped.choices[0].message.content or "")
    assert (bounded.choices[0].finish_reason, bounded.usage and bounded.usage.completion_tokens) == ("length", 5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_every_parameter_of_ours_is_understood(client: openai.OpenAI) -> None:
    body = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 4, "stop_token_ids": [5]}
    answer = client.chat.completions.create(
        model="vllm", messages=PARIS, max_tokens=12, temperature=0.8, top_p=0.9, seed=2**62,
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"100": -5}, extra_body=body,
    )  # fmt: skip

    assert answer.usage is not None
    assert 4 <= answer.usage.completion_tokens <= 12


def test_a_seed_repeats_an_answer_and_the_pool_does_not_claim_more(
    client: openai.OpenAI, platform: PlatformProcess
) -> None:
    def say(seed: int) -> str | None:
        return (
            client.chat.completions.create(model="vllm", messages=COUNT, temperature=1.0, seed=seed, max_tokens=16)
            .choices[0]
            .message.content
        )

    models = httpx.get(
        f"{platform.url}/v1/models", headers={"authorization": f"Bearer {platform.key}"}, timeout=30, trust_env=False
    ).json()["data"]

    assert say(1) == say(1) != say(2)
    assert next(model for model in models if model["id"] == "vllm")["exact"] is False


def test_a_tenants_adapter_answers_on_vllm_as_on_our_own_engine(platform: PlatformProcess, tmp_path: Path) -> None:
    folder = tmp_path / write_adapter(tmp_path, resolve("demo"), seed=1)
    files = [("file", (name, (folder / name).read_bytes())) for name in FILES]
    headers = {"authorization": f"Bearer {platform.key}"}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=300, trust_env=False) as http:
        made = [
            http.post("/v1/adapters", data={"name": f"tone-{model}", "base_model": model}, files=files)
            for model in MODELS
        ]
        assert [response.status_code for response in made] == [201, 201], [response.text for response in made]
        body = {"prompt": "The sun is a star. The moon is", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
        adapted, base = (
            [http.post("/v1/completions", json=body | {"model": name}).json() for name in names]
            for names in ([f"tone-{model}" for model in MODELS], MODELS)
        )

    said = [answer["choices"][0]["token_ids"] for answer in adapted]
    assert said[0] == said[1]
    assert said[1] != base[1]["choices"][0]["token_ids"], "the adapter changes nothing"


def test_a_client_that_hangs_up_frees_its_place(client: openai.OpenAI, platform: PlatformProcess) -> None:
    stream = client.chat.completions.create(
        model="vllm", messages=COUNT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_for(lambda: platform.metric("penstock_running_sequences", pool="vllm") == 1, within_s=10)
    stream.close()

    wait_for(lambda: platform.metric("penstock_running_sequences", pool="vllm") == 0, within_s=10)


def test_a_killed_child_is_replaced_with_its_replica_and_another_start_leaves_none_behind(
    client: openai.OpenAI, platform: PlatformProcess
) -> None:
    (before,) = bridges(platform.pid)
    stream = client.chat.completions.create(
        model="vllm", messages=COUNT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(before, signal.SIGKILL)
    with pytest.raises(
        openai.APIError, match="no other could go on"
    ):  # an event of the stream: the pool has one replica
        list(stream)
    wait_for(lambda: bool(bridges(platform.pid)) and before not in bridges(platform.pid), within_s=HEAL_S)
    assert "Paris" in (
        client.chat.completions.create(model="ours", messages=PARIS, temperature=0, max_tokens=16)
        .choices[0]
        .message.content
        or ""
    )
    wait_for(lambda: platform.metric("penstock_replicas", pool="vllm") == 1, within_s=HEAL_S)

    answer = client.chat.completions.create(model="vllm", messages=PARIS, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    (after,) = bridges(platform.pid)
    assert after != before


def test_a_killed_replica_takes_its_child_with_it_and_all_that_started(
    client: openai.OpenAI, platform: PlatformProcess
) -> None:
    (number,) = bridges(platform.pid)
    child = psutil.Process(number)
    replica = child.parent()
    assert replica is not None
    started = [child, *child.children(recursive=True)]
    stream = client.chat.completions.create(
        model="vllm", messages=COUNT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    replica.kill()  # in the middle of a step

    wait_for(lambda: not any(is_alive(process) for process in started), within_s=10)
    stream.close()
