"""The fake server, checked by clients that are not ours: httpx and the `openai` package, over real sockets."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.fake.answer import join_words
from penstock_loadtest.fake.behaviour import Behaviour, Fault, FaultKind, Replicas, Shedding, Stall, load_behaviour
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.scenario import Lengths
from tests.real_time import real_time
from tests.unit.loadtest.stand_in import blocked

FAST = Behaviour(ttft_s=Lengths(constant=0.001), gap_s=Lengths(constant=0.0))
LATE_S = 0.1
"""How much later than programmed things may happen on a busy machine, in tests that are about something else."""


class World(NamedTuple):
    server: FakeServer
    http: httpx.AsyncClient

    async def chat(self, content: str = "one two three", **fields: object) -> httpx.Response:
        body = {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}
        return await self.http.post("chat/completions", json=body)

    async def stream(self, content: str = "one two three", **fields: object) -> list[Any]:
        """The events of a streamed chat, in the order they came; the last is "[DONE]" when it came."""
        return events((await self.chat(content, stream=True, stream_options={"include_usage": True}, **fields)).text)

    async def begin(self, count: int) -> list[asyncio.Task[httpx.Response]]:
        """Chats that have arrived one after another."""
        tasks = []
        for number in range(len(self.server.truths) + 1, len(self.server.truths) + 1 + count):
            tasks.append(asyncio.create_task(self.chat()))
            await self.until(lambda number=number: len(self.server.truths) == number)  # type: ignore[misc]
        return tasks

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not happened():  # noqa: ASYNC110 (what the server notices has no event)
                await asyncio.sleep(0)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def contents(stream: list[Any]) -> list[str]:
    found = [
        event["choices"][0]["delta"].get("content") for event in stream if event != "[DONE]" and event.get("choices")
    ]
    return [content for content in found if content]


@asynccontextmanager
async def open_world(behaviour: Behaviour) -> AsyncIterator[World]:
    async with FakeServer(behaviour) as server, httpx.AsyncClient(base_url=server.url, timeout=20) as http:
        yield World(server, http)


def with_fault(kind: FaultKind, after_tokens: int | None = None) -> Behaviour:
    """A behaviour in which request 0 has the fault and request 1 has not."""
    return Behaviour(
        ttft_s=FAST.ttft_s,
        gap_s=FAST.gap_s,
        faults=[Fault(kind=kind, numbers=[0], after_tokens=after_tokens, delay_s=0.2)],
    )


# --- answers


async def test_the_openai_client_reads_whole_answers_and_streams_of_both_endpoints() -> None:
    async with (
        open_world(FAST) as there,
        openai.AsyncOpenAI(base_url=there.server.url, api_key="any", max_retries=0) as client,
    ):
        ids = {"return_token_ids": True}
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "name two rivers"}]
        chat = await client.chat.completions.create(model="fake", messages=messages, max_tokens=5, extra_body=ids)
        stream = await client.chat.completions.create(
            model="fake",
            messages=messages,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=ids,
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="fake", prompt="name two rivers", max_tokens=5)
        text_chunks = [
            chunk
            async for chunk in await client.completions.create(
                model="fake", prompt=[7, 8, 9], max_tokens=5, stream=True
            )
        ]

        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        token_ids = [token for choice in choices for token in choice.token_ids]  # type: ignore[attr-defined]
        assert (
            chat.choices[0].message.content
            == "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            == join_words(token_ids)
        )
        assert chat.choices[0].token_ids == token_ids  # type: ignore[attr-defined]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage == chat.usage
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (3, 5)
        assert chat._request_id == there.server.truths[0].request_id
        assert text.usage is not None
        assert len(text.choices[0].text.split()) == text.usage.completion_tokens == 5
        assert len("".join(chunk.choices[0].text for chunk in text_chunks).split()) == 5
        assert [truth.outcome for truth in there.server.truths] == ["finished"] * 4
        assert there.server.metered == {"default": 20}


async def test_the_same_request_gets_the_same_answer_and_another_seed_another() -> None:
    async with open_world(FAST) as there:
        texts = [contents(await there.stream(seed=seed)) for seed in (1, 1, 2)]

        assert texts[0] == texts[1] != texts[2]


async def test_token_ids_and_usage_are_sent_only_when_asked_for_and_allowed() -> None:
    async with open_world(FAST) as there:
        bare = events((await there.chat(stream=True)).text)

        assert all("usage" not in event and "token_ids" not in event["choices"][0] for event in bare[:-1])
    async with open_world(Behaviour(ttft_s=FAST.ttft_s, token_ids=False, usage=False)) as there:
        answer = (await there.chat(return_token_ids=True)).json()

        assert "usage" not in answer
        assert "token_ids" not in answer["choices"][0]


async def test_an_answer_ends_early_unless_the_request_ignores_the_end() -> None:
    async with open_world(Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, output_tokens=Lengths(constant=3))) as there:
        early, whole = (await there.chat()).json(), (await there.chat(ignore_eos=True)).json()

        assert (early["usage"]["completion_tokens"], early["choices"][0]["finish_reason"]) == (3, "stop")
        assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (8, "length")


async def test_several_tokens_share_a_chunk() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, tokens_per_chunk=Lengths(constant=3))
    ) as there:
        stream = await there.stream(return_token_ids=True)

        assert [len(event["choices"][0]["token_ids"]) for event in stream[:-2]] == [3, 3, 2, 0]
        assert [len(content.split()) for content in contents(stream)] == [3, 3, 2]


async def test_cached_tokens_are_the_leading_blocks_that_were_seen_by_the_same_tenant() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, prefix_block_tokens=4, keys={"one": "alice", "two": "bob"})
    ) as there:
        prompts = ["a b c d e f g h", "a b c d X Y", "a b c d e f g h i", "X b c d e f g h"]
        alice, bob = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
        bodies = [{"model": "fake", "prompt": prompt, "max_tokens": 1} for prompt in prompts]
        cached = [
            (await there.http.post("completions", json=body, headers=alice)).json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
            for body in bodies
        ]
        other = (await there.http.post("completions", json=bodies[2], headers=bob)).json()["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]

        assert cached == [0, 4, 8, 0]
        assert other == 0
        assert there.server.metered == {"alice": 4, "bob": 1}


# --- times


def arrivals_of(text: list[tuple[float, str]]) -> list[float]:
    return [at for at, line in text if '"content"' in line or '"text"' in line]


async def timed_chat(there: World, **fields: object) -> list[float]:
    """Times at which each line with content was read, on the clock of the truths."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "one two three"}], "stream": True, **fields}
    async with there.http.stream("POST", "chat/completions", json=body) as response:
        return arrivals_of([(time.perf_counter(), line) async for line in response.aiter_lines()])


@real_time
async def test_tokens_come_when_they_are_due_and_lateness_does_not_add_up() -> None:
    behaviour = Behaviour(ttft_s=Lengths(constant=0.1), gap_s=Lengths(constant=0.02), prompt_token_s=0.01)

    async with open_world(behaviour) as there:
        arrivals = await timed_chat(there, max_tokens=20)
        [truth] = there.server.truths
        due = [truth.arrival_s + chunk.offset_s for chunk in truth.chunks(behaviour)]

        assert due[0] - truth.arrival_s == pytest.approx(0.13)
        assert [b - a for a, b in pairwise(due)] == pytest.approx([0.02] * 19)
        assert len(arrivals) == 20
        assert all(0 <= at - expected < LATE_S for at, expected in zip(arrivals, due, strict=True))
        assert min(at - expected for at, expected in zip(arrivals, due, strict=True)) < 0.005
        assert truth.late_s < LATE_S


async def test_what_was_drawn_is_computed_from_seed_and_request_alone() -> None:
    spread = Behaviour(
        seed=3,
        ttft_s=Lengths(lognormal=(0.01, 0.04)),
        gap_s=Lengths(uniform=(0.0, 0.002)),
        gap_per="token",
        output_tokens=Lengths(choices=[2, 4]),
        drawn_by="seed",
    )

    async with open_world(spread) as there:
        for seed in (5, 6, 5):
            await there.stream(seed=seed)
        first, other, again = there.server.truths

        assert first.chunks(spread) == again.chunks(spread) != other.chunks(spread)
        assert all(truth.tokens in (2, 4) for truth in there.server.truths)
        assert all(chunk.offset_s > 0 for truth in there.server.truths for chunk in truth.chunks(spread))


@real_time
async def test_nothing_is_sent_in_a_stall_and_everything_due_comes_at_its_end() -> None:
    behaviour = Behaviour(
        ttft_s=Lengths(constant=0.05), gap_s=Lengths(constant=0.01), stalls=[Stall(from_s=0.1, for_s=0.3)]
    )

    async with open_world(behaviour) as there:
        arrivals = await timed_chat(there, max_tokens=60)
        zero = there.server.zero_s
        assert zero is not None
        arrived_s = [at - zero for at in arrivals]

        assert len([at for at in arrived_s if at < 0.1]) >= 1
        assert not [at for at in arrived_s if 0.1 + LATE_S < at < 0.4]
        assert len([at for at in arrived_s if 0.4 <= at < 0.4 + LATE_S]) >= 30
        assert arrived_s[-1] >= 0.64  # 0.05 + 59 x 0.01: what is due later is not moved


async def test_errors_and_pages_wait_for_the_end_of_a_stall_too() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, stalls=[Stall(from_s=0.0, for_s=0.3)])
    ) as there:
        await there.chat()
        await there.http.get("models")
        assert there.server.zero_s is not None

        assert time.perf_counter() - there.server.zero_s >= 0.3


async def test_connections_can_be_reset_during_a_stall() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, stalls=[Stall(from_s=0.001, for_s=30, accepts=False)])
    ) as there:
        held = asyncio.create_task(there.chat())  # the first request starts the clock, and is held
        await there.until(lambda: there.server.zero_s is not None and time.perf_counter() > there.server.zero_s + 0.002)
        async with httpx.AsyncClient(base_url=there.server.url) as late:
            with pytest.raises(httpx.TransportError):
                await late.get("models")
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held


async def test_requests_wait_for_a_slot_in_the_order_they_came() -> None:
    behaviour = Behaviour(ttft_s=Lengths(constant=0.13), gap_s=Lengths(constant=0.01), slots=2)

    async with open_world(behaviour) as there:
        await asyncio.gather(*(there.chat(max_tokens=3) for _ in range(6)))
        truths = there.server.truths
        starts = [truth.start_s or 0.0 for truth in truths]
        ends = [truth.end_s or 0.0 for truth in truths]

        assert starts[:2] == [truth.arrival_s for truth in truths[:2]]
        # exactly: a slot passes on when it was due, not when the loop came to it
        assert starts[2:] == [max(truth.arrival_s, end_s) for truth, end_s in zip(truths[2:], ends[:4], strict=True)]
        assert [end_s - start_s for start_s, end_s in zip(starts, ends, strict=True)] == pytest.approx([0.15] * 6)


async def test_a_request_that_is_read_before_an_end_that_was_due_earlier_begins_no_earlier_than_it_came() -> None:
    """The event loop stands still meanwhile, and then finds both at once."""
    async with open_world(Behaviour(ttft_s=Lengths(constant=0.1), slots=1)) as there:
        port = httpx.URL(there.server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = asyncio.create_task(there.chat(max_tokens=1))
        await there.until(lambda: len(there.server.truths) == 1)
        body = b'{"model":"fake","prompt":"a","max_tokens":1}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        blocked(0.2)
        await asyncio.gather(first, reader.readuntil(b"\r\n\r\n"))
        writer.close()
        ended, begun = there.server.truths

        assert begun.start_s == begun.arrival_s
        assert ended.end_s is not None
        assert ended.end_s < begun.arrival_s


async def test_a_client_that_hangs_up_frees_its_slot_and_its_place_in_the_queue() -> None:
    behaviour = Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, slots=1, faults=[Fault(kind="hang", numbers=[0, 1])])

    async with open_world(behaviour) as there:
        tasks = await there.begin(3)
        tasks[1].cancel()
        await there.until(lambda: there.server.truths[1].outcome == "gone")
        tasks[0].cancel()
        assert (await tasks[2]).status_code == 200

        outcomes = [truth.outcome for truth in there.server.truths]
        assert outcomes == ["gone", "gone", "finished"]


# --- shedding, faults, pages


async def test_requests_above_the_rate_are_shed_with_a_true_retry_after() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, shedding=Shedding(rate=0.1, burst=2))
    ) as there:
        answers = [await there.chat() for _ in range(4)]

        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        came_s = [truth.arrival_s for truth in there.server.truths]
        assert int(answers[2].headers["retry-after"]) == math.ceil(10 - (came_s[2] - came_s[0]))
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert [truth.outcome for truth in there.server.truths] == ["finished", "finished", "shed", "shed"]


async def test_requests_above_the_concurrency_are_shed() -> None:
    async with open_world(
        Behaviour(
            ttft_s=FAST.ttft_s,
            gap_s=FAST.gap_s,
            shedding=Shedding(concurrency=2, status=503, retry_after_s=7),
            faults=[Fault(kind="hang", numbers=[0, 1])],
        )
    ) as there:
        tasks = await there.begin(2)
        shed = await there.chat()
        tasks[0].cancel()
        await there.until(lambda: there.server.truths[0].outcome == "gone")
        taken = await there.chat()
        tasks[1].cancel()

        assert (shed.status_code, shed.headers.get("retry-after")) == (503, "7")
        assert (taken.status_code, taken.headers.get("retry-after")) == (200, None)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["close_before_headers", "close_mid_stream"])
async def test_a_connection_breaks_off(kind: FaultKind, stream: bool) -> None:
    async with open_world(with_fault(kind)) as there:
        with pytest.raises(httpx.RemoteProtocolError):
            await there.chat(stream=stream)
        after = await there.chat(stream=stream)

        assert after.status_code == 200
        assert [truth.outcome for truth in there.server.truths] == ["failed", "finished"]


async def test_an_error_event_ends_a_stream() -> None:
    async with open_world(with_fault("error_event", after_tokens=3)) as there:
        stream = await there.stream()

        assert len(contents(stream)) == 3
        assert stream[-1]["error"]["code"] == "engine_fault"
        assert there.server.truths[0].sent_tokens == 3


async def test_a_stream_lacks_its_end() -> None:
    async with open_world(with_fault("no_done")) as there:
        bad, good = await there.stream(), await there.stream()

        assert bad[-1] != "[DONE]"
        assert good[-1] == "[DONE]"
        assert contents(bad) == contents(good)


@pytest.mark.parametrize(
    ("kind", "finishes", "tokens", "metered"),
    [("double_finish", 2, 8, 8), ("content_after_finish", 1, 9, 8), ("wrong_usage", 1, 8, 9)],
)
async def test_a_stream_breaks_the_protocol(kind: FaultKind, finishes: int, tokens: int, metered: int) -> None:
    async with open_world(with_fault(kind)) as there:
        stream = await there.stream()

        assert (
            len([event for event in stream[:-1] if event["choices"] and event["choices"][0]["finish_reason"]])
            == finishes
        )
        assert len(contents(stream)) == there.server.truths[0].sent_tokens == tokens
        assert stream[-2]["usage"]["completion_tokens"] == metered


async def test_a_repeated_request_gets_another_answer() -> None:
    async with open_world(with_fault("different_answer")) as there:
        assert contents(await there.stream()) != contents(await there.stream())


async def test_an_internal_error_and_slow_headers_are_sent() -> None:
    async with open_world(with_fault("status_500")) as there:
        assert (await there.chat()).json()["error"]["code"] == "internal_error"
        assert there.server.truths[0].status == 500
    async with open_world(with_fault("slow_headers")) as there:
        assert contents(await there.stream()) == contents(await there.stream())
        slow, fast = [truth.end_s - truth.arrival_s for truth in there.server.truths if truth.end_s is not None]
        assert slow == pytest.approx(0.2)
        assert fast == pytest.approx(0.001)


async def test_a_request_that_hangs_ends_when_the_client_goes() -> None:
    async with open_world(with_fault("hang")) as there:
        with pytest.raises(httpx.ReadTimeout):
            await there.http.post(
                "completions", json={"model": "fake", "prompt": "a"}, timeout=httpx.Timeout(20, read=0.05)
            )
        await there.until(lambda: [truth.outcome for truth in there.server.truths] not in ([], ["open"]))

        assert there.server.truths[0].outcome == "gone"


async def test_faults_hit_about_their_share() -> None:
    async with open_world(
        Behaviour(ttft_s=Lengths(constant=0), faults=[Fault(kind="status_500", share=0.25)])
    ) as there:
        statuses = [(await there.chat(max_tokens=1)).status_code for _ in range(200)]

        assert 30 <= statuses.count(500) <= 80


async def test_keys_and_models_are_checked() -> None:
    async with open_world(Behaviour(ttft_s=FAST.ttft_s, gap_s=FAST.gap_s, keys={"right": "us"})) as there:
        refused = await there.chat()
        there.http.headers["authorization"] = "Bearer right"
        unknown = await there.chat(model="other")

        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await there.chat()).status_code == 200
        assert [truth.tenant for truth in there.server.truths] == ["us"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "can't be read"),
        (b'{"model": "fake"}', "`messages` is missing"),
        (b'{"model": "fake", "messages": [], "n": 2}', "`n` must be 1"),
        (b'{"model": "fake", "messages": [], "max_tokens": 0}', "`max_tokens` must be"),
        (
            b'{"model": "fake", "messages": [], "return_token_ids": true}',
            "Unrecognized request argument supplied: return_token_ids",
        ),
    ],
)
async def test_a_bad_body_is_refused_with_a_sentence(body: bytes, sentence: str) -> None:
    async with open_world(Behaviour(refused_fields=["return_token_ids"])) as there:
        answer = await there.http.post("chat/completions", content=body)

        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]


async def test_pages_say_what_is_served() -> None:
    replicas = [Replicas(count=2, pool="p"), Replicas(count=5, pool="p", from_s=0.001)]
    async with open_world(
        Behaviour(ttft_s=Lengths(constant=0.01), models=["a", "b"], exact=True, replicas=replicas)
    ) as there:
        root = there.server.url.removesuffix("/v1")
        assert [(model["id"], model["exact"]) for model in (await there.http.get("models")).json()["data"]] == [
            ("a", True),
            ("b", True),
        ]
        assert (await there.http.get("models/b")).json()["id"] == "b"
        assert (await there.http.get("models/c")).status_code == 404
        assert (await there.http.get(f"{root}/healthz")).status_code == 200
        assert (await there.http.get(f"{root}/nothing")).status_code == 404
        assert 'penstock_replicas{pool="p",tier="edge"} 2\n' in (await there.http.get(f"{root}/metrics")).text
        await there.chat(model="a")
        assert 'penstock_replicas{pool="p",tier="edge"} 5\n' in (await there.http.get(f"{root}/metrics")).text


async def test_a_connection_is_kept_unless_the_client_wants_it_closed() -> None:
    async with open_world(FAST) as there:
        kept = [await there.chat(), await there.http.get("models")]
        last = [await there.http.get("models", headers={"connection": "close"})]
        body = {"model": "fake", "prompt": "a", "max_tokens": 2, "stream": True}
        last.append(await there.http.post("completions", json=body, headers={"connection": "close"}))

        assert [answer.headers.get("connection") for answer in kept] == [None, None]
        assert [answer.headers.get("connection") for answer in last] == ["close", "close"]


async def test_a_receipt_is_in_the_headers() -> None:
    async with open_world(
        Behaviour(ttft_s=FAST.ttft_s, tier="cloud", replica_names=["r0", "r1"], cached_tokens=2)
    ) as there:
        answers = [await there.chat(max_tokens=1) for _ in range(3)]

        assert [answer.headers["x-penstock-replica"] for answer in answers] == ["r0", "r1", "r0"]
        assert answers[0].headers["x-penstock-tier"] == "cloud"
        assert answers[0].headers["x-penstock-cached-tokens"] == "2"
        assert float(answers[0].headers["x-penstock-predicted-ttft-ms"]) == pytest.approx(1)


# --- as a command


def test_a_server_of_its_own_process_writes_its_truths() -> None:
    behaviour = Behaviour(ttft_s=Lengths(constant=0.01), models=["m"])
    with fake_server_process(behaviour) as fake:
        before = time.perf_counter()
        answer = httpx.post(
            f"{fake.url}/completions", json={"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}, timeout=20
        )
        with httpx.stream(
            "POST",
            f"{fake.url}/completions",
            json={"model": "m", "prompt": "a", "max_tokens": 100_000, "stream": True},
            timeout=20,
        ) as left:
            next(left.iter_lines())
            truths = fake.stop()

    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert [truth.outcome for truth in truths] == ["finished", "gone"]
    assert before < truths[0].arrival_s < time.perf_counter()  # one clock for all processes


def test_a_bad_behaviour_is_refused_with_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "behaviour.yaml"
    for text, complaint in {
        "ttft_s: {constant: 1, uniform: [1, 2]}": "exactly one",
        "tftt_s: 1": "tftt_s",
        "slots: 0": "slots is 0; it must be above 0",
        "faults: [{kind: hang, share: 0.6}, {kind: no_done, share: 0.6}]": "more than 1",
        "ttft_s: {": "not YAML",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ScenarioInvalid, match=rf"behaviour\.yaml.*{complaint}"):
            load_behaviour(path)
    with pytest.raises(ScenarioInvalid, match="can't be read"):
        load_behaviour(tmp_path / "none.yaml")
