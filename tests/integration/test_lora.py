"""Adapters as tenants meet them: brought, named, replaced and deleted while the platform serves; logits as peft's;
nobody else's business.

The adapters are random and made by peft, for the demo model's shapes.
"""

import asyncio
import io
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import transformers

from bench.support.platform_process import PlatformProcess, running_platform
from penstock.adapters.peft import CONFIG_FILE, WEIGHTS_FILE
from penstock.adapters.registry import Adapter, Registry
from penstock.adapters.store import digest_of
from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.cli.state import StateDir
from penstock.router.api.reads import KEEP_S
from penstock.tenancy.keys import create_key
from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.errors import InvalidRequest, Overloaded
from penstock.wire.frames import SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.sequence import Chunk, Sequence, Step
from tests.unit.workers.lora_files import adapted

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

CONFIG = """
gateway: {{port: {port}}}
adapters: {{sources: {{https: listed, hosts: ['127.0.0.1:FILES_PORT']}}}}
pools:
  - name: demo
    served_names: [demo]
    replicas: 2
    engine: {{dtype: float32, threads: 1, kv_memory_bytes: 67108864, max_num_seqs: 32, \
adapters: {{slots: 3, max_rank: 16}}}}
"""
STREAM_TOKENS = 64
"""Many times what a stream says while an adapter comes and another one goes."""
NUM_FLIPS, FLIP_TOKENS = 50, 24
PROMPT = "The sun is a star. The moon is"
SIZE = 0.03
"""Spread of the adapters' weights: enough to change what the demo model says, not so much that it talks in one
token."""


@dataclass(frozen=True)
class Tenants:
    """Two, their keys, and adapters on disk."""

    url: str
    keys: dict[str, str]
    folder: Path

    def client(self, tenant: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.keys[tenant]}"}, timeout=60, trust_env=False
        )

    def openai(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=120)

    def upload(self, tenant: str, name: str, which: str, **fields: str) -> httpx.Response:
        files = [("file", (file, (self.folder / which / file).read_bytes())) for file in (CONFIG_FILE, WEIGHTS_FILE)]
        with self.client(tenant) as client:
            return client.post("/v1/adapters", data={"name": name, **fields}, files=files)

    def answer(self, tenant: str, model: str, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
            **more,
        }
        with self.client(tenant) as client:
            response = client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def demo_on_peft() -> transformers.PreTrainedModel:
    source = resolve("demo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            source.path.parent,
            gguf_file=source.path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return model


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """peft's model with the adapters `a` and `b`, and the folder where they are saved."""
    folder = tmp_path_factory.mktemp("adapters")
    model = adapted(demo_on_peft(), folder / "a", seed=1, rank=8, size=SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, seed in (("b", 2), ("c", 3)):
            config = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
            )
            model.add_adapter(name, config)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if f".{name}." in parameter_name:
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 * SIZE)
            model.save_pretrained(folder, selected_adapters=[name])
    return model.eval(), folder


@pytest.fixture(scope="module")
def files_port(oracle: tuple[Any, Path]) -> Iterator[int]:
    """A server on this machine that has the adapters' folders."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=oracle[1])) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, files_port: int) -> Iterator[PlatformProcess]:
    config = CONFIG.replace("FILES_PORT", str(files_port))
    with running_platform(tmp_path_factory.mktemp("platform"), config) as running:
        yield running


@pytest.fixture(scope="module")
def tenants(platform: PlatformProcess, oracle: tuple[Any, Path]) -> Tenants:
    async def keys() -> dict[str, str]:
        secret = StateDir(platform.state).secret()
        async with connect(platform.redis_url) as client:
            return {tenant: await create_key(client, secret, tenant) for tenant in ("acme", "other")}

    return Tenants(platform.url, asyncio.run(keys()), oracle[1])


def peft_logits(model: Any, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab], behind each token."""
    with torch.inference_mode():
        if adapter is None:
            with model.disable_adapter():
                logits = model(torch.tensor([token_ids])).logits[0]
        else:
            model.set_adapter("default" if adapter == "a" else adapter)
            logits = model(torch.tensor([token_ids])).logits[0]
    return logits.float()


@pytest.mark.slow
@pytest.mark.usefixtures("torch_threads")
def test_two_adapters_and_the_base_in_one_batch_have_the_logits_of_peft(
    oracle: tuple[Any, Path], record_property: Callable[[str, object], None]
) -> None:
    """The demo model in its runner, step by step: prompts of different lengths, then decoding; every step holds all
    three."""
    model, folder = oracle
    runner = load_runner(
        resolve("demo"), EngineConfig(dtype="float32", threads=1, kv_memory_bytes=64 * 2**20), poison=True
    )
    adapters = ("a", "b", None)
    seqs, found = [], [list[torch.Tensor]() for _ in adapters]
    for number, name in enumerate(adapters):
        prompt = [(37 * place + number) % 40000 for place in range(20 + 9 * number)]
        lora = None if name is None else runner.load_adapter(digest_of(folder / name), folder / name, 16)
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        seqs.append(
            Sequence(
                "r",
                prompt,
                sampling,
                len(prompt),
                [],
                b"",
                0.0,
                lora=lora,
                block_table=list(range(9 * number, 9 * number + 9)),
            )
        )
    while seqs[0].num_output_tokens < 8:
        step = Step([Chunk(seq, seq.num_computed_tokens, seq.num_uncomputed_tokens) for seq in seqs], [])
        batch, logits = runner.forward(step)
        for seq, row, (chosen,), rows in zip(seqs, logits, runner.choose(step, batch, logits), found, strict=True):
            rows.append(row)
            seq.num_computed_tokens = seq.num_tokens
            seq.token_ids.append(chosen.token_id)

    expected = [
        peft_logits(model, name, seq.token_ids)[seq.num_prompt_tokens - 1 : -1]
        for name, seq in zip(adapters, seqs, strict=True)
    ]
    difference = max(
        (torch.stack(rows) - wanted).abs().max().item() for rows, wanted in zip(found, expected, strict=True)
    )
    base = peft_logits(model, None, seqs[0].token_ids)[seqs[0].num_prompt_tokens - 1 : -1]
    record_property("max_logit_difference_from_peft", difference)
    assert difference <= 2e-3
    assert (expected[0] - base).abs().max() > 0.5, "the adapter moves nothing, so nothing was compared"


async def test_two_tenants_adapters_and_the_base_answer_side_by_side_as_peft_does(
    tenants: Tenants, oracle: tuple[Any, Path]
) -> None:
    first, second = tenants.upload("acme", "tone", "a"), tenants.upload("other", "tone", "b", base_model="demo")
    assert (first.status_code, second.status_code) == (201, 201), first.text + second.text
    assert [(found["version"], found["rank"], found["state"]) for found in (first.json(), second.json())] == [
        (1, 8, "loaded"),
        (1, 4, "loaded"),
    ]
    prompt = load_tokenizer(resolve("demo")).encode(PROMPT, add_special=True)
    asks = [("acme", "tone", "a"), ("other", "tone", "b"), ("acme", "demo", None), ("other", "demo:tone", "b")]

    answers = await asyncio.gather(*(asyncio.to_thread(tenants.answer, tenant, model) for tenant, model, _ in asks))

    texts = []
    for (_, model, adapter), answer in zip(asks, answers, strict=True):
        choice = answer["choices"][0]
        output = choice["token_ids"]
        expected = peft_logits(oracle[0], adapter, prompt + output)[len(prompt) - 1 : -1].log_softmax(-1)
        told = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(told, expected[torch.arange(12), torch.tensor(output)], atol=2e-3, rtol=0)
        assert (expected.max(-1).values - told <= 2e-3).all(), "greedy, but for near-ties"
        assert answer["model"] == model
        texts.append(choice["text"])
    assert len(set(texts)) == 3, "adapters and base say different things, and the two names of one adapter the same"
    assert texts[1] == texts[3]
    assert len({answer["system_fingerprint"] for answer in answers}) == 3


def test_an_adapter_comes_from_a_server_that_the_operator_has_listed_and_from_no_other(
    tenants: Tenants, platform: PlatformProcess, files_port: int
) -> None:
    with tenants.client("other") as client:
        answers = [
            client.post("/v1/adapters", json={"name": "fetched", "source": f"{server}/c"})
            for server in (f"http://127.0.0.1:{files_port}", platform.url, "http://169.254.169.254")
        ]
    uploaded = tenants.upload("other", "uploaded", "c")

    assert [answer.status_code for answer in answers] == [201, 400, 400], [answer.text for answer in answers]
    assert answers[0].json()["digest"] == uploaded.json()["digest"]
    texts = {tenants.answer("other", name)["choices"][0]["text"] for name in ("fetched", "uploaded")}
    assert len(texts) == 1
    with tenants.client("other") as client:
        for name in ("fetched", "uploaded"):
            assert client.delete(f"/v1/adapters/{name}").status_code == 200


def test_a_tenants_adapters_are_listed_for_it_and_do_not_exist_for_another(tenants: Tenants) -> None:
    tenants.upload("acme", "secret-plan", "a")
    with tenants.client("acme") as acme, tenants.client("other") as other:
        mine = {model["id"]: model for model in acme.get("/v1/models").json()["data"]}
        theirs = {model["id"] for model in other.get("/v1/models").json()["data"]}
        refusals = [
            other.post("/v1/completions", json={"model": "secret-plan", "prompt": "x"}),
            other.post("/v1/completions", json={"model": "demo:secret-plan", "prompt": "x"}),
            other.get("/v1/models/secret-plan"),
            other.get("/v1/adapters/secret-plan"),
            other.delete("/v1/adapters/secret-plan"),
        ]

        assert {mine["secret-plan"][key] for key in ("parent", "root")} == {"demo"}
        assert mine["secret-plan"]["owned_by"] == "acme"
        assert acme.get("/v1/models/secret-plan").status_code == acme.get("/v1/adapters/secret-plan").status_code == 200
        assert "secret-plan" not in theirs
        assert [refusal.status_code for refusal in refusals] == [404] * 5
        assert all("acme" not in refusal.text for refusal in refusals)
        assert "secret-plan" not in other.get("/v1/adapters").text
        assert acme.delete("/v1/adapters/secret-plan").json() == {
            "id": "secret-plan",
            "object": "adapter",
            "deleted": True,
        }


@pytest.mark.slow
async def test_adapters_come_and_go_under_eight_streams_and_none_fails(tenants: Tenants) -> None:
    """A third one is loaded and used beside the two that run; a deleted one ends for new requests at once, not for its
    streams."""
    for tenant, which in (("acme", "a"), ("other", "b")):
        assert tenants.upload(tenant, "kept", which).status_code == 201
        assert tenants.upload(tenant, "tone", which).is_success, "also where no other test has brought it before"

    async def stream(client: openai.AsyncOpenAI, model: str, started: asyncio.Queue[str]) -> int:
        chunks = await client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=STREAM_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        num_tokens = 0
        async for chunk in chunks:
            if num_tokens == 0:
                started.put_nowait(model)
            num_tokens = chunk.usage.completion_tokens if chunk.usage is not None else num_tokens + 1
        return num_tokens

    started: asyncio.Queue[str] = asyncio.Queue()
    async with tenants.openai("acme") as acme, tenants.openai("other") as other:
        asks = [
            (acme, "kept"),
            (other, "kept"),
            (acme, "demo"),
            (acme, "tone"),
            (other, "demo"),
            (other, "tone"),
            (acme, "kept"),
            (other, "kept"),
        ]
        streams = [asyncio.create_task(stream(client, model, started)) for client, model in asks]
        async with asyncio.timeout(60):
            for _ in asks:
                await started.get()
        running = []
        uploaded = await asyncio.to_thread(tenants.upload, "acme", "late", "c")
        running.append(sum(not task.done() for task in streams))
        with tenants.client("acme") as client:
            deleted = await asyncio.to_thread(client.delete, "/v1/adapters/kept")
            running.append(sum(not task.done() for task in streams))
            gone = await asyncio.to_thread(client.post, "/v1/completions", json={"model": "kept", "prompt": "x"})
            used = await asyncio.to_thread(tenants.answer, "acme", "late", 4)
            statuses = [
                uploaded.status_code,
                deleted.status_code,
                gone.status_code,
                len(used["choices"][0]["token_ids"]),
            ]
            statuses.append((await asyncio.to_thread(client.delete, "/v1/adapters/late")).status_code)
        num_tokens = await asyncio.gather(*streams)

    assert running == [8, 8], "a load and a deletion under streams that all run"
    assert statuses == [201, 200, 404, 4, 200]
    assert num_tokens == [STREAM_TOKENS] * 8


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_name_flips_fifty_times_under_sixteen_streams_and_each_answer_is_one_versions_whole(
    tenants: Tenants, record_property: Callable[[str, object], None]
) -> None:
    """Equal prompts of four blocks, so that KV of the other version would be found if it could be. Answers differ in
    length, so that some are always under way, and the next flip comes when a request was sent behind the last one."""
    prompt = list(range(1000, 1064))
    expected: dict[str, list[int]] = {}
    for which in "ab":
        assert tenants.upload("acme", "live", which).status_code == 201
        answer = tenants.answer("acme", "live", FLIP_TOKENS, prompt=prompt)
        expected[answer["system_fingerprint"]] = answer["choices"][0]["token_ids"]
    first, second = expected.values()
    assert first != second
    answers: list[tuple[set[str], list[int], int]] = []
    num_flips = 0
    sent: asyncio.Queue[int] = asyncio.Queue()

    async def stream(client: openai.AsyncOpenAI, max_tokens: int) -> None:
        while num_flips < NUM_FLIPS:
            begun = num_flips
            sent.put_nowait(begun)
            chunks = await client.completions.create(
                model="live",
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            fingerprints, token_ids = set[str](), list[int]()
            async for chunk in chunks:
                fingerprints.add(chunk.system_fingerprint or "")
                for choice in chunk.choices:
                    token_ids += (choice.model_extra or {}).get("token_ids") or []
            assert len(token_ids) == max_tokens
            answers.append((fingerprints, token_ids, num_flips - begun))

    async with tenants.openai("acme") as client, asyncio.TaskGroup() as tasks:
        for number in range(16):
            tasks.create_task(stream(client, FLIP_TOKENS - number))
        began_s = time.monotonic()
        versions = []
        for flip in range(NUM_FLIPS):
            response = await asyncio.to_thread(tenants.upload, "acme", "live", "ab"[flip % 2])
            versions.append((response.status_code, response.json().get("version")))
            num_flips += 1
            async with asyncio.timeout(120):
                while flip < NUM_FLIPS - 1 and await sent.get() < num_flips:
                    pass
        took_s = time.monotonic() - began_s

    wrong = [
        (fingerprints, token_ids)
        for fingerprints, token_ids, _ in answers
        if len(fingerprints) != 1 or token_ids != expected[min(fingerprints)][: len(token_ids)]
    ]
    of_each = [sum(fingerprint in answer[0] for answer in answers) for fingerprint in expected]
    num_across = sum(flips > 0 for _, _, flips in answers)
    record_property("flips_s", round(took_s, 1))
    record_property("answers", {"of each version": of_each, "across a flip": num_across})
    assert versions == [(201, 3 + flip) for flip in range(NUM_FLIPS)]
    assert not wrong
    assert min(of_each) >= NUM_FLIPS // 2 - 1, "requests meet every version"
    assert num_across >= 16, "answers were under way while the name changed"


def test_a_changed_adapter_under_the_same_name_shares_no_kv_with_its_predecessor(tenants: Tenants) -> None:
    """Equal requests find each other's blocks; with another adapter, another version of it or the base none is
    found."""
    prompt = {"prompt": list(range(2000, 2064)), "max_tokens": 4}

    def cached(model: str) -> int:
        found: int = tenants.answer("acme", model, **prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    versions = [tenants.upload("acme", "changing", "a").json()["version"]]
    cold, warm, base = cached("changing"), cached("changing"), cached("demo")
    before = tenants.answer("acme", "changing", **prompt)["choices"][0]["token_ids"]
    versions.append(tenants.upload("acme", "changing", "b").json()["version"])
    changed = cached("changing")
    after = tenants.answer("acme", "changing", **prompt)["choices"][0]["token_ids"]
    versions.append(tenants.upload("acme", "changing", "b").json()["version"])
    versions.append(tenants.upload("acme", "changing", "a").json()["version"])
    back = cached("changing")

    assert (cold, base, changed) == (0, 0, 0)
    assert warm == back == 48, "equal tokens, equal files: found"
    assert before != after
    assert versions == [1, 2, 2, 3]


def test_what_can_not_be_served_is_refused_with_a_sentence_and_leaves_nothing(
    tenants: Tenants, tmp_path: Path, platform: PlatformProcess
) -> None:
    weights = (tenants.folder / "a" / WEIGHTS_FILE).read_bytes()
    config = (tenants.folder / "a" / CONFIG_FILE).read_text(encoding="utf-8")
    with tenants.client("acme") as client:

        def post(name: str, *files: tuple[str, bytes]) -> tuple[int, str]:
            response = client.post(
                "/v1/adapters", data={"name": name}, files=[("file", (file, io.BytesIO(data))) for file, data in files]
            )
            return response.status_code, response.json()["error"]["message"]

        before = {adapter["id"] for adapter in client.get("/v1/adapters").json()["data"]}
        good = (CONFIG_FILE, config.encode()), (WEIGHTS_FILE, weights)
        refusals = [
            post("x", good[0], ("adapter_model.bin", weights)),
            post("x", good[0]),
            post("x", (CONFIG_FILE, config.replace('"use_dora": false', '"use_dora": true').encode()), good[1]),
            post("x", (CONFIG_FILE, config.replace('"r": 8', '"r": 99').encode()), good[1]),
            post("x", good[0], (WEIGHTS_FILE, weights[:-4])),
            post("demo", *good),
            post("no/name", *good),
        ]
        imported = client.post("/v1/adapters", json={"name": "x", "path": "anywhere"})

        assert [status for status, _ in refusals] == [400] * 7
        for (_, message), part in zip(
            refusals,
            ("pickle", "lacks", "DoRA", "ranks up to 16", "safetensors", "name of a model", "letters"),
            strict=True,
        ):
            assert part in message
        assert imported.status_code == 400
        assert "no import folder" in imported.json()["error"]["message"]
        assert {adapter["id"] for adapter in client.get("/v1/adapters").json()["data"]} == before
    assert not list((platform.state / "adapters").glob("draft-*"))


def test_usage_names_the_adapter_and_metrics_only_the_base(tenants: Tenants, platform: PlatformProcess) -> None:
    with tenants.client("other") as client:
        before = {row["adapter"]: row["requests"] for row in client.get("/v1/usage").json()["data"]}
        tenants.answer("other", "tone", 2)
        time.sleep(KEEP_S)  # the page is kept for so long
        after = {row["adapter"]: row["requests"] for row in client.get("/v1/usage").json()["data"]}
    metrics = httpx.get(f"{platform.url}/metrics", timeout=10, trust_env=False).text

    assert after["tone"] == before.get("tone", 0) + 1
    assert 'model="demo"' in metrics
    assert "tone" not in metrics


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


async def test_the_registry_keeps_tenants_apart_counts_versions_and_outlives_redis_for_what_it_knows(
    server: EmbeddedRedis,
) -> None:
    def adapter(digest: str) -> Adapter:
        return Adapter(digest, "demo", "m" * 32, 8, ("q_proj",), 100, 1)

    async with connect(server.url) as client:
        registry, elsewhere = Registry(client, max_per_tenant=2), Registry(client, max_per_tenant=2)
        put = [(await registry.put("acme", "a", adapter(digest))).version for digest in ("d1", "d1", "d2", "d1")]
        await registry.put("acme", "b", adapter("d3"))
        await registry.put("other", "a", adapter("d1"))
        with pytest.raises(InvalidRequest, match="2 adapters already"):
            await registry.put("acme", "c", adapter("d4"))
        with pytest.raises(InvalidRequest, match="name is 1 to 64"):
            await registry.put("acme", "no name", adapter("d4"))

        assert put == [1, 2 - 1, 2, 3]
        assert {
            name: (found.adapter.digest, found.version) for name, found in (await registry.all("acme")).items()
        } == {"a": ("d1", 3), "b": ("d3", 1)}
        assert await registry.owned_digests() == {"d1", "d3"}
        assert await registry.get("other", "b") is None
        assert await elsewhere.get("acme", "a") == await registry.get("acme", "a"), "another gateway knows at once"
        removed = await registry.remove("acme", "a")
        assert removed is not None
        assert removed.version == 3
        assert await registry.get("acme", "a") is None
        assert await elsewhere.get("acme", "a") is None
        assert await registry.remove("acme", "a") is None
        assert (await registry.put("acme", "a", adapter("d1"))).version == 4
        known = await registry.get("other", "a")
        server.stop()

        with pytest.raises(Overloaded):
            await registry.remove("other", "a")
        assert await registry.get("other", "a") == known, "what could not be deleted is still there"
        with pytest.raises(Overloaded):
            await registry.get("acme", "never-asked")
        with pytest.raises(Overloaded):
            await registry.all("acme")
