"""A gateway without replicas: a tokenizer whose ids are bytes, a dispatcher that plays a script, keys in a
dictionary."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import msgspec
import uvicorn
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from penstock.base.metrics import Metrics
from penstock.base.redis import connect
from penstock.base.tracing import Tracing
from penstock.router.api.asgi import make_app
from penstock.router.batches.dependencies import BatchDependencies
from penstock.router.completions.admission import Admission
from penstock.router.completions.dependencies import GatewayDependencies, PoolReplicas
from penstock.router.completions.fair_threads import FairThreads
from penstock.router.config import GatewayConfig, ProviderConfig
from penstock.router.models.adapter_models import AdapterDependencies
from penstock.router.models.request_targets import RequestTargets
from penstock.router.models.served_model import ServedModel
from penstock.router.routing.request import Dispatcher, Generation, HoldListener, Receipt, Route
from penstock.tenancy.keys import KeyStore, record_of
from penstock.tenancy.limits import Limiter
from penstock.tenancy.tariffs import NO_TARIFFS, Tariffs
from penstock.tenancy.tenants import Record, Settings, settings_key
from penstock.tenancy.usage import UsageLog
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.vocabulary import Vocabulary
from penstock.wire.frames import BeamOutput, Delta, Finish, PromptLogprobs, TokenLogprobs, pack_token_ids

KEY = "sk-penstock-" + "0123456789abcdef" * 3
SECRET = b"a cluster secret"
MODEL = "tiny"
CONTEXT = 512
IM_START, IM_END = 256, 257
VOCAB_SIZE = 258
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant"
)


def byte_tokenizer(
    flip: int = 0, template: str = TEMPLATE, prefix_ids: tuple[int, ...] = (), special_tokens: tuple[str, ...] = ()
) -> Tokenizer:
    """The id of a token is its byte, with the bits of `flip` flipped. prefix_ids: before every text. special_tokens:
    further ones, from id VOCAB_SIZE on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    raw = RawTokenizer(models.BPE(vocab={token: byte ^ flip for token, byte in vocabulary.items()}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    raw.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    size = VOCAB_SIZE + len(special_tokens)
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(
        Vocabulary(raw, size, size, frozenset({IM_END}), prefix_ids, (), special),
        ChatTemplate(template, special),
    )


TOKENIZER = byte_tokenizer()
SERVED = ServedModel(
    MODEL, ("pool-a",), TOKENIZER, lambda: CONTEXT, "0123456789abcdef", routes=(Route("edge", ("pool-a",)),)
)
OTHER_TOKENIZER = byte_tokenizer(flip=1)
"""Tokenizer of another model: the same text is other ids."""


@dataclass
class Script:
    """The answers of the dispatcher. Each answer is the bytes of `text`, one delta each, or `deltas` as they are."""

    text: str = "Paris."
    deltas: Sequence[Sequence[int]] | None = None
    finish: Finish = Finish.STOP
    error: Exception | None = None
    """Raised after the deltas, instead of a finish."""
    refusal: Exception | None = None
    """Raised by `start`."""
    hold_start: asyncio.Event | None = None
    """`start` waits for it."""
    is_cold: bool = False
    """Whether `hold_start` stands for a first replica."""
    late_refusal: Exception | None = None
    """Raised by `start` after that wait."""
    hold_after: int | None = None
    """`next` waits for ever after that many deltas."""
    cached_tokens: int = 16
    predicted_tokens: int = 16
    has_logprobs: bool = True


class FakeStream:
    def __init__(self, script: Script, generation: Generation, on_close: Callable[[], None]) -> None:
        self.receipt = Receipt(
            generation.request_id, "edge", "only tier", "pool-a", "replica-1", predicted_ttft_s=0.0125, is_taken=True
        )
        self.receipt.stays = generation.tier_rule.stays
        self.receipt.cached_tokens, self.receipt.predicted_cached_tokens = script.cached_tokens, script.predicted_tokens
        self._script = script
        self._sampling = generation.sampling
        self._num_prompt_tokens = generation.num_prompt_tokens
        deltas = script.deltas if script.deltas is not None else [[byte] for byte in script.text.encode()]
        self._deltas = list(deltas)
        self.num_given = 0
        self._on_close = on_close
        self.is_closed = False
        self.listener: Callable[[Delta], bool] | None = None
        self._resumed = asyncio.Event()

    def listen(self, listener: Callable[[Delta], bool]) -> None:
        self.listener = listener

    def resume(self) -> None:
        """Ends the wait of `hold_after`."""
        self._resumed.set()

    async def next(self) -> Delta:
        assert not self.is_closed
        if self.num_given == self._script.hold_after:
            await self._resumed.wait()
        if self.num_given == len(self._deltas) and self._script.error is not None:
            raise self._script.error
        if self._sampling.num_beams:
            return self._search()
        ids = list(self._deltas[self.num_given])
        self.num_given += 1
        is_last = self.num_given == len(self._deltas) and self._script.error is None
        await asyncio.sleep(0)
        return Delta(
            1,
            ids,
            self._script.finish if is_last else None,
            logprobs=self._logprobs(len(ids)),
            prompt_logprobs=self._prompt_logprobs() if self.num_given == 1 else None,
        )

    def _logprobs(self, num_tokens: int) -> list[TokenLogprobs] | None:
        """The likeliest tokens are always 0, 1, 2 and so on."""
        num_top = self._sampling.logprobs
        if num_top is None or not self._script.has_logprobs:
            return None
        return [TokenLogprobs(-0.5, tuple((token, -1.0 - token) for token in range(num_top)))] * num_tokens

    def _search(self) -> Delta:
        """What was computed so far, for each byte of the text; then the text, and behind it the number of the beam."""
        params, text = self._sampling, self._script.text.encode()
        self.num_given += 1
        scores = self._prompt_logprobs() if self.num_given == 1 else None
        if self.num_given <= len(text):
            return Delta(1, [], prompt_logprobs=scores, num_beam_tokens=params.num_beams * self.num_given)
        beams = [
            BeamOutput([*text, 48 + number], Finish.LENGTH, self._logprobs(len(text) + 1))
            for number in range(params.num_returned)
        ]
        computed = params.num_beams * (len(text) + 1)
        return Delta(1, [], Finish.LENGTH, prompt_logprobs=scores, beams=beams, num_beam_tokens=computed)

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Each token is the third likeliest; the likeliest are always 0, 1, 2 and so on."""
        num_top, count = self._sampling.prompt_logprobs, self._num_prompt_tokens - 1
        if num_top is None or not self._script.has_logprobs or not count:
            return None
        return PromptLogprobs(
            num_top,
            array("f", [-0.25] * count).tobytes(),
            pack_token_ids([3] * count),
            pack_token_ids([*range(num_top)] * count),
            array("f", [-1.0 - token for token in range(num_top)] * count).tobytes(),
        )

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_close()


class FakeDispatcher:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.generations: list[Generation] = []
        self.given_at_start: list[list[int]] = []
        """Number of deltas that each earlier stream had given, at each start."""
        self.streams: list[FakeStream] = []
        self.num_open = 0
        self.num_waiting = 0
        self.changed = asyncio.Condition()

    async def start(self, generation: Generation, listener: HoldListener | None = None) -> FakeStream:
        self.generations.append(generation)
        self.given_at_start.append([stream.num_given for stream in self.streams])
        if self.script.refusal is not None:
            raise self.script.refusal
        if self.script.hold_start is not None:
            if listener is not None and self.script.is_cold:
                listener.begin_hold(lambda: 42.0)
            await self._queue(self.script.hold_start)
            if listener is not None and self.script.is_cold:
                listener.end_hold()
            if self.script.late_refusal is not None:
                raise self.script.late_refusal
        self.num_open += 1
        self._notify()
        self.streams.append(FakeStream(self.script, generation, self._closed))
        return self.streams[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def _queue(self, gate: asyncio.Event) -> None:
        self.num_waiting += 1
        self._notify()
        try:
            await gate.wait()
        finally:
            self.num_waiting -= 1
            self._notify()

    def _closed(self) -> None:
        self.num_open -= 1
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._notifying = asyncio.ensure_future(notify())


@dataclass
class FakeRedis:
    data: dict[str, bytes] = field(default_factory=dict)

    async def get(self, name: str) -> bytes | None:
        return self.data.get(name)


@dataclass
class World:
    """One gateway and what it was made of."""

    app: ASGIApp
    dispatcher: FakeDispatcher
    metrics: Metrics
    client: httpx.AsyncClient
    pools: list[PoolReplicas]
    admission: Admission
    store: FakeRedis
    """What Redis holds of keys and tenants."""
    deps: GatewayDependencies

    async def post(self, path: str, **body: object) -> httpx.Response:
        return await self.client.post(path, json={"model": MODEL, **body})

    async def chat(self, **body: object) -> httpx.Response:
        return await self.post(
            "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Capital of France?"}], **body}
        )

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "The capital is", **body})


@asynccontextmanager
async def running_gateway(
    script: Script | None = None,
    config: GatewayConfig | None = None,
    dispatcher: Dispatcher | None = None,
    settings: Settings | None = None,
    model: ServedModel | None = None,
    providers: Sequence[ProviderConfig] = (),
    tracing: Tracing | None = None,
    models: Mapping[str, ServedModel] | None = None,
    adapters: AdapterDependencies | None = None,
    num_gateways: int | None = None,
    threads: FairThreads | None = None,
    batches: BatchDependencies | None = None,
    targets: RequestTargets | None = None,
    tariffs: Tariffs = NO_TARIFFS,
) -> AsyncIterator[World]:
    """settings: of the tenant. model: what is served as MODEL. models: what is served, by name, instead.

    num_gateways: as Redis had it before it went away; None: it has never been there, and limits can't be checked.
    """
    fake = FakeDispatcher(script or Script())
    store = FakeRedis()
    name, value = record_of(SECRET, "tenant-1", KEY)
    store.data = {
        name: value,
        settings_key("tenant-1"): msgspec.json.encode(Record(settings=settings or Settings(), created=0, updated=0)),
    }
    metrics = Metrics()
    nowhere = connect("unix:///nonexistent/redis.sock")
    limiter = Limiter(nowhere, "gateway-1")
    limiter.num_gateways = num_gateways
    pools = [PoolReplicas("pool-a", "edge", 2)]
    admission = Admission(limiter, UsageLog(nowhere, "gateway-1"), metrics, tariffs=tariffs)
    deps = GatewayDependencies(
        config=config or GatewayConfig(),
        models=models or {MODEL: model or SERVED},
        dispatcher=dispatcher or fake,
        keys=KeyStore(store, SECRET, cache_s=60),
        admission=admission,
        metrics=metrics,
        replicas=lambda: pools,
        providers={provider.name: provider for provider in providers},
        has_provider=lambda: bool(providers),
        tracing=tracing,
        adapters=adapters,
        threads=threads or FairThreads(),
        batches=batches,
        targets=targets or RequestTargets({}),
    )
    app = make_app(deps)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers={"Authorization": f"Bearer {KEY}"}
    ) as client:
        yield World(app, fake, metrics, client, pools, admission, store, deps)


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The app behind a real socket; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http="httptools", lifespan="off", log_config=None, access_log=False)
    )
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


def events(response: httpx.Response) -> list[str]:
    """Data of the server-sent events."""
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [line.removeprefix("data: ") for line in lines[:-1]]
