"""Settings of the gateway and of the pools it routes to."""

import re
from ipaddress import ip_network
from math import inf
from typing import Literal

import msgspec

from penstock.adapters.peft import BaseShapes
from penstock.base.errors import ConfigError
from penstock.base.tls import TlsFiles
from penstock.text.reasoning import ReasoningParserName
from penstock.text.tools.forms import ToolParserName
from penstock.wire.money import MAX_BUDGET, check_price
from penstock.wire.targets import NO_TARGETS, ClassTargets

EXTENSIONS = frozenset({"top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens"})
"""Parameters of requests that OpenAI's API has not and that need no vocabulary."""

ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$"
"""An origin as browsers send it, scheme, host and port; or `*`."""
MAX_HELD_TOKENS = 256
"""Bound of escalation.tokens: nobody waits longer for a first word, and a gateway holds them."""
MAX_GRACE_MINUTES = 30 * 24 * 60
"""Bound of gateway.key_grace_minutes: revocations are remembered for longer (tenancy.keys.TOMBSTONE_S)."""


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one gateway: the section `gateway` of the configuration."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port of the API; a node has one gateway."""
    admin_port: int | None = None
    """Port of /metrics, /healthz and /readyz, which tenants then cannot get at; None: they are on `port`, like
    everything else."""
    max_ongoing_requests: int = 2048
    """Posts that one gateway works on at once, from the valid key to the end of the response, waiting ones included;
    one more is refused with Retry-After. One tenant may have four times as many as are free, so four fifths of all."""
    trusted_proxies: tuple[str, ...] | None = None
    """Networks of the proxies in front, whose X-Forwarded-For tells the client's address; empty: clients connect
    directly. None: what stands in front is not known, and nothing is limited by address."""
    max_connections: int = 8192
    """Connections of one gateway; at most half of them may be such on which no valid key was shown. One more has the
    oldest of those closed, or one that rests."""
    max_connections_per_address: int = 256
    """Connections of one client's address on which no valid key was shown; one more has the oldest closed, once it is a
    second old."""
    head_timeout_s: float = 10.0
    """Longest wait for a request's line and headers."""
    max_body_bytes: int = 8 * 2**20
    """Largest body of a generation request."""
    max_held_body_bytes: int = 64 * 2**20
    """Bytes of bodies that one gateway holds at once, at least twice `max_body_bytes`: from their arrival until their
    prompts are read, and where a provider or another model may answer until the answer ends. A body beyond it is
    refused with Retry-After. One tenant may have four fifths of it."""
    body_timeout_s: float = 30.0
    """Longest wait for the rest of a request's body."""
    max_queue: int = 1024
    """Requests waiting for a replica in one gateway; one more is refused with Retry-After."""
    queue_timeout_s: float = 30.0
    """Longest wait for a replica before a request is refused with Retry-After."""
    hold_timeout_s: float = 600.0
    """The same where a pool has no replica and one is started for the request (autoscale.min_replicas: 0)."""
    max_held: int = 64
    """Requests of one tenant that may wait like that in one gateway; one more is refused with Retry-After."""
    fairness: Literal["vtc", "arrival"] = "vtc"
    """Order in which requests of different tenants leave the queue. vtc: the tenant goes first that has had the fewest
    tokens for its weight (`penstock tenant set --weight`). arrival: first come, first served, whoever it is."""
    max_queue_share: float = 0.5
    """Part of the queue that requests of one tenant may fill; one more is refused with Retry-After."""
    reserved_places: float = 0.05
    """Part of the replicas' places that a tenant with its share of them leaves free, while other tenants are active; 0:
    none."""
    request_timeout_s: float = 600.0
    """Deadline of a request that names none."""
    default_max_tokens: int = 1024
    """Output bound of a request that names none, as far as the context allows."""
    max_answer_tokens: int = 2**19
    """Most tokens of all choices of one request together. With `logprobs` a token counts twice, and once more for each
    of its `top_logprobs`."""
    max_buffered_deltas: int = 1024
    """Deltas held for a client that reads slowly; one more aborts its sequence."""
    key_cache_s: float = 0.5
    """Age at which a known API key and its tenant's settings are looked up again: a revoked key is refused that long
    after it was revoked at the latest. While Redis is away, known keys go on."""
    key_grace_minutes: float = 720.0
    """Longest time for which a known API key goes on without Redis confirming it, because Redis is away or has lost
    its data, in minutes; counted from the last confirmation. 0: not at all. At most 30 days."""
    ttft_target_s: float = 1.0
    """Target of the time to first token of each class that `targets` names none for: what a request is measured by, and
    up to which prediction it stays on the first tier of its tenant's policy."""
    overdue: Literal["in_turn", "last"] = "in_turn"
    """Turn of a request whose first token is predicted to come later than its class's target and what its prompt takes
    alone. in_turn: its own. last: behind those that may be in time, and to a replica only where hardly any prompt is
    before it; where the queue is full it makes way for its tenant's others. Beside a tenant that floods, fewer requests
    of a light one may be answered (docs/decisions/fairness.md). Needs `fairness: vtc`."""
    provider_cap: float | None = None
    """Sum that all providers together may cost in a calendar month (UTC), in the currency of their prices; a request
    that might exceed it is sent to none of them. None: there is no such bound."""
    max_receipts: int = 4096
    """Receipts of the latest sequences that one gateway keeps for GET /v1/receipts/{request_id}; a request with n
    choices has n. Where they are too many, the oldest of a tenant with more than an even share are forgotten."""
    pin_cores: tuple[int, ...] = ()
    """Numbers of the cores that a gateway's process is pinned to; empty: the kernel chooses. The same on every node."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser, such as https://app.example.com, or `*` for all; empty: none
    may."""
    strict: bool = False
    """Whether a request with an unknown field is refused; else such a field is ignored and named in the response. The
    header `x-penstock-strict: 1` asks for it too."""
    tls: TlsFiles | None = None
    """HTTPS on both ports, and nothing else; with a `ca`, for clients with a certificate of it only. None: HTTP, for a
    load balancer in front that has the certificate."""

    @property
    def tenant_queue_share(self) -> float:
        """Part of the queue that one tenant may fill: all of it where the order knows of no tenants."""
        return self.max_queue_share if self.fairness == "vtc" else 1.0

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"gateway.port must lie in 1..65535, not {self.port}")
        if self.admin_port is not None and (not 0 < self.admin_port < 65536 or self.admin_port == self.port):
            raise ConfigError(
                f"gateway.admin_port must lie in 1..65535 and differ from gateway.port, not {self.admin_port}"
            )
        for name in (
            "max_ongoing_requests",
            "max_connections",
            "max_connections_per_address",
            "max_body_bytes",
            "max_held_body_bytes",
            "max_queue",
            "max_held",
            "default_max_tokens",
            "max_answer_tokens",
            "max_buffered_deltas",
            "max_receipts",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"gateway.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.max_queue_share <= 1:
            raise ConfigError(f"gateway.max_queue_share must lie above 0 and up to 1, not {self.max_queue_share}")
        if self.overdue == "last" and self.fairness != "vtc":
            raise ConfigError("gateway.overdue: last needs gateway.fairness: vtc, which knows whose requests wait")
        if not 0 <= self.reserved_places < 1:
            raise ConfigError(f"gateway.reserved_places must lie in 0..1, 1 left out, not {self.reserved_places}")
        if not 0 <= self.key_grace_minutes <= MAX_GRACE_MINUTES:
            raise ConfigError(
                f"gateway.key_grace_minutes must lie in 0..{MAX_GRACE_MINUTES} (30 days), not {self.key_grace_minutes}"
            )
        for name in ("ttft_target_s", "head_timeout_s", "hold_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"gateway.{name} must be more than 0, not {getattr(self, name)}")
        if len(set(self.pin_cores)) < len(self.pin_cores) or any(core < 0 for core in self.pin_cores):
            raise ConfigError(f"gateway.pin_cores holds numbers of cores from 0, each once, not {list(self.pin_cores)}")
        if self.provider_cap is not None and not 0 < self.provider_cap <= MAX_BUDGET:
            raise ConfigError(
                f"gateway.provider_cap must lie above 0 and up to {MAX_BUDGET:.0f}, not {self.provider_cap:g}"
            )
        for origin in self.cors_origins:
            if not re.fullmatch(ORIGIN_PATTERN, origin):
                raise ConfigError(
                    f"gateway.cors_origins holds origins such as https://app.example.com, or '*', not {origin!r}"
                )
        for text in self.trusted_proxies or ():
            try:
                ip_network(text)
            except ValueError as error:
                raise ConfigError(
                    f"gateway.trusted_proxies holds networks such as 10.0.0.0/8, not {text!r}: {error}"
                ) from error


class AdapterBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shapes and rank that an adapter must have to be served by a pool."""

    shapes: BaseShapes
    max_rank: int


class EscalationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rule by which requests leave an edge pool for another tier, before anything of the answer is shown."""

    tokens: int = 16
    """First tokens of an answer that are held back and judged; a shorter answer is judged by all of its own."""
    min_mean_logprob: float
    """Mean natural logarithm of the chosen tokens' probabilities below which the request is sent on; at most 0.
    `penstock tiers tune` proposes it."""
    to: str | None = None
    """Pool of another tier, or provider, that answers instead; None: whichever of the model's is the soonest."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_HELD_TOKENS:
            raise ConfigError(f"escalation.tokens must lie in 1..{MAX_HELD_TOKENS}, not {self.tokens}")
        if not -inf < self.min_mean_logprob <= 0:
            raise ConfigError(
                f"escalation.min_mean_logprob is a mean of logarithms of probabilities, 0 at most, not"
                f" {self.min_mean_logprob}"
            )


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool as its configuration describes it, which a gateway knows before a replica is there."""

    name: str
    served_names: tuple[str, ...]
    """Model names of the API that this pool answers to."""
    tier: Literal["edge", "cloud"]
    model: str
    """Checkpoint: path, hub id, or `demo`; tokenizer and chat template are read from it."""
    app_name: str
    """Name of the Serve application of the pool's replicas."""
    exact: bool = False
    """Whether the pool's answers are independent of what runs beside them."""
    adapters: AdapterBase | None = None
    """Requirements on adapters; None: the pool serves none."""
    is_scaled: bool = False
    """Whether an autoscaler needs reports about this pool."""
    starts_on_demand: bool = False
    """Whether the pool may have no replica, and gets one when a request comes."""
    num_replicas: int | None = None
    """Replicas that the configuration gives the pool; None: the autoscaler decides."""
    max_model_len: int
    """Longest context, prompt and answer, in tokens."""
    tool_parser: ToolParserName = "auto"
    """Form in which the model is told of tools and writes calls."""
    reasoning_parser: ReasoningParserName = "auto"
    """Markers of what the model thinks before it answers."""
    price_per_hour: float | None = None
    """Price of an hour of one replica; None: no money is shown."""
    targets: ClassTargets = NO_TARGETS
    """Targets of the pool's requests by class, the platform's where it names none."""
    keeps_tpot: bool = False
    """Whether its replicas keep the targets of `tpot_s`."""
    escalation: EscalationConfig | None = None
    """The rule by which another tier answers instead; None: none does."""

    @property
    def paced_classes(self) -> frozenset[str]:
        """Classes for whose answers rows of the class batch yield in its replicas."""
        return self.targets.paced_classes if self.keeps_tpot else frozenset()


class ProviderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A server with OpenAI's API, outside of the platform, as part of the cloud tier."""

    name: str
    """Part of metric labels and receipts: letters, digits, dashes."""
    base_url: str
    """URL up to and including /v1."""
    model: str
    """Name of the model on that server."""
    served_names: tuple[str, ...]
    """Model names of the API that the provider may answer to; a pool serves each of them too."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; None: the server wants none."""
    tier: Literal["cloud"] = "cloud"
    ttft_s: float = 1.0
    """Expected time to first token until the server has answered once; then the mean of its answers counts."""
    max_concurrency: int = 32
    """Most requests of one gateway to the server at once."""
    timeout_s: float = 60.0
    """Longest wait for the first byte of an answer, and for each further one."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field of a chat request that bounds the answer on that server."""
    extra_fields: tuple[str, ...] = ()
    """Parameters beyond OpenAI's that the server understands (top_k, min_p, repetition_penalty, ignore_eos,
    min_tokens). A request that sets another one is not sent there."""
    breaker_failures: int = 3
    """Failures in a row after which no request is sent there for a while."""
    breaker_open_s: float = 5.0
    """Length of that while at first, seconds; doubled with each failed trial."""
    input_price: float | None = None
    """Price per million prompt tokens, in any currency; with output_price it makes penstock_provider_cost_total."""
    output_price: float | None = None
    """Price per million output tokens, in the same currency."""
    cached_price: float | None = None
    """Price per million prompt tokens of which the server says that they were in its cache; None: `input_price`."""
    cap: float | None = None
    """Sum that the server may cost in a calendar month (UTC), beside gateway.provider_cap; None: there is no bound of
    its own."""
    prompt_margin: float = 0.5
    """Part by which the server may count a prompt longer than our own model does, for what is reserved of the caps."""

    def __post_init__(self) -> None:
        where = f"providers[{self.name!r}]"
        if not self.name or not all(part.isalnum() and part.isascii() for part in self.name.split("-")):
            raise ConfigError(f"a provider's name is letters, digits and dashes between them, not {self.name!r}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{where}.base_url must begin with http:// or https://, not {self.base_url!r}")
        if not self.served_names:
            raise ConfigError(f"{where}.served_names is empty: the provider would never be asked")
        for name in ("ttft_s", "timeout_s", "breaker_open_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{where}.{name} must be more than 0, not {getattr(self, name)}")
        for name in ("max_concurrency", "breaker_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}.{name} must be at least 1, not {getattr(self, name)}")
        if (self.input_price is None) != (self.output_price is None):
            raise ConfigError(f"{where}: input_price and output_price belong together; set both or neither")
        if self.cached_price is not None and self.input_price is None:
            raise ConfigError(f"{where}: cached_price needs input_price and output_price")
        for name in ("input_price", "output_price", "cached_price"):
            check_price(getattr(self, name), f"{where}.{name}")
        if self.cap is not None and not 0 < self.cap <= MAX_BUDGET:
            raise ConfigError(f"{where}.cap must lie above 0 and up to {MAX_BUDGET:.0f}, not {self.cap:g}")
        if self.cap is not None and self.input_price is None:
            raise ConfigError(f"{where}.cap needs input_price and output_price")
        if not 0 <= self.prompt_margin <= 10:
            raise ConfigError(f"{where}.prompt_margin must lie in 0..10, not {self.prompt_margin:g}")
        for field in self.extra_fields:
            if field not in EXTENSIONS:
                raise ConfigError(f"{where}.extra_fields may hold {', '.join(sorted(EXTENSIONS))}, not {field!r}")
