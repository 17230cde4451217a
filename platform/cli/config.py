"""The configuration of a whole platform on one machine: `penstock.yaml`.

Each part's own settings stand with the part (`router.config`, `workers.config`); here they come together, and
combinations that can't work are refused with a sentence before anything starts.
"""

from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from penstock.adapters.config import AdaptersConfig
from penstock.autoscale.config import AutoscaleBudget, AutoscaleConfig
from penstock.base.config import load
from penstock.base.errors import ConfigError
from penstock.base.redis_roles import ROLES, RoleName
from penstock.base.redis_url import check_redis_url, with_tls
from penstock.base.telemetry import TelemetryConfig
from penstock.router.batches.config import BatchesConfig
from penstock.router.config import EscalationConfig, GatewayConfig, ProviderConfig
from penstock.tenancy.tariffs import TariffRule
from penstock.text.reasoning import ReasoningParserName
from penstock.text.tools.forms import ToolParserName
from penstock.wire.money import check_price
from penstock.wire.stream_config import StreamConfig
from penstock.wire.targets import ClassTargets, GatewayTargets, Target, TargetsConfig, same_for_all
from penstock.workers.config import EngineConfig

GPU_START_S = 1800.0
"""Seconds that replicas of our own engine get to come up on GPUs: hundreds of GiB may have to be read from a network's
disk, and kernels to be compiled where none are kept."""


class RedisUrls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Addresses of one Redis, with the user of each role; `penstock redis-acl` prints what each may do."""

    gateway: str | None = None
    replica: str | None = None
    autoscaler: str | None = None
    operator: str | None = None


class RedisTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paths of PEM files for rediss://, rediss+sentinel:// and rediss+cluster://."""

    ca: str | None = None
    """CAs that the server's certificate is checked by; None: the system's."""
    certificate: str | None = None
    """Own certificate, where the server asks for one."""
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("redis.tls.certificate and redis.tls.key belong together; set both or neither")


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str | None = None
    """Address of Redis: redis://, rediss:// or unix://, or of several servers (`base.redis_url`); None: an embedded
    server, kept alive, with its data in the state folder."""
    urls: RedisUrls = msgspec.field(default_factory=RedisUrls)
    """Addresses by role, each with a user of its own; those left out take `url`."""
    tls: RedisTls | None = None
    """Certificates for addresses that begin with rediss; None: the servers' are checked by the system's CAs."""

    def url_for(self, role: RoleName) -> str | None:
        """Address of Redis for a role, certificates included; None: the embedded server."""
        url: str | None = getattr(self.urls, role) or self.url
        if url is None or self.tls is None:
            return url
        return with_tls(url, self.tls.ca, self.tls.certificate, self.tls.key)

    def __post_init__(self) -> None:
        if self.url is not None:
            check_redis_url(self.url)
        for role in ROLES:
            url = getattr(self.urls, role)
            if url is not None:
                check_redis_url(url, f"redis.urls.{role}")
            if url is not None and self.url is None:
                raise ConfigError(f"redis.urls.{role} is set, but not redis.url: the embedded Redis has its own users")
            if self.tls is not None and not (self.url_for(role) or "").startswith("rediss"):
                raise ConfigError("redis.tls is set, but an address of Redis does not begin with rediss")


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Equal replicas of one model."""

    name: str
    """Name of the pool, part of process names and metric labels: letters, digits, dashes."""
    model: str = "demo"
    """Checkpoint: path of a GGUF file or safetensors directory, hub id, or `demo` (SmolLM2-135M-Instruct). A timed pool
    takes its tokenizer and chat template from it."""
    served_names: tuple[str, ...] = ()
    """Model names of the API; none: the model's own."""
    tier: Literal["edge", "cloud"] = "cloud"
    replicas: int = 1
    """Number of replicas; where the pool is scaled, the number that it starts with."""
    tool_parser: ToolParserName = "auto"
    """Form in which the model is told of tools and writes calls. auto: as its chat template says; hermes, llama3 or
    mistral: the template shows tools, and calls come in that format; text: a text of ours, whatever the template."""
    reasoning_parser: ReasoningParserName = "auto"
    """Markers of what the model thinks before it answers, which chats have apart. auto: as its chat template and its
    vocabulary say; qwen3: <think> and </think>; deepseek_r1: the same, and answers begin with thinking also where
    nothing opens it; mistral: [THINK] and [/THINK]; none: what a model thinks is content."""
    targets: ClassTargets | None = None
    """Targets of this pool's requests by class; what they leave out is as in the platform's `targets`. None: all of
    it."""
    escalation: EscalationConfig | None = None
    """The rule by which another tier answers instead of this edge pool, because the model is unsure of its first tokens
    or can't keep to a constraint; None: none does. All edge pools of a served name have the same."""
    autoscale: AutoscaleConfig | None = None
    """Settings of scaling; None: the pool always has `replicas`."""
    price_per_hour: float | None = None
    """Price of an hour of one replica, in any currency, the same as of every other price; None: no money is shown."""
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)

    @property
    def names(self) -> tuple[str, ...]:
        """The model names that the pool answers to."""
        return self.served_names or (self.model,)

    @property
    def counted_gpus(self) -> int:
        """GPUs that one replica counts for in `autoscale_budget`."""
        named = None if self.autoscale is None else self.autoscale.gpus
        return self.engine.num_gpus if named is None else named

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas at one time: the autoscaler's bound where the pool is scaled."""
        return self.replicas if self.autoscale is None else self.autoscale.max_replicas

    def __post_init__(self) -> None:
        where = f"pools[{self.name!r}]"
        if not self.name or not all(part.isalnum() and part.isascii() for part in self.name.split("-")):
            raise ConfigError(f"a pool's name is letters, digits and dashes between them, not {self.name!r}")
        check_price(self.price_per_hour, f"{where}.price_per_hour")
        if self.replicas < 1:
            raise ConfigError(f"{where}.replicas must be at least 1, not {self.replicas}")
        if (
            self.autoscale is not None
            and not self.autoscale.min_replicas <= self.replicas <= self.autoscale.max_replicas
        ):
            raise ConfigError(
                f"{where}.replicas ({self.replicas}) must lie between autoscale.min_replicas "
                f"({self.autoscale.min_replicas}) "
                f"and autoscale.max_replicas ({self.autoscale.max_replicas})"
            )
        for name, count in Counter(self.served_names).items():
            if count > 1 or not name:
                raise ConfigError(
                    f"{where}.served_names holds {name!r} {count} times"
                    if name
                    else f"{where}.served_names holds an empty name"
                )
        if self.targets is not None:
            self.targets.check(f"{where}.targets")
        if self.engine.runner == "timed" and self.engine.exact:
            raise ConfigError(f"{where}: runner: timed computes nothing, so it can't be combined with exact: true")


class PlatformConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    redis: RedisConfig = msgspec.field(default_factory=RedisConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    stream: StreamConfig = msgspec.field(default_factory=StreamConfig)
    telemetry: TelemetryConfig = msgspec.field(default_factory=TelemetryConfig)
    adapters: AdaptersConfig = msgspec.field(default_factory=AdaptersConfig)
    batches: BatchesConfig = msgspec.field(default_factory=BatchesConfig)
    targets: TargetsConfig = msgspec.field(default_factory=TargetsConfig)
    """Targets of requests by their tenant's class, for pools that name no others."""
    pools: tuple[PoolConfig, ...] = ()
    autoscale_budget: AutoscaleBudget | None = None
    """GPUs that the scaled pools share by their priority; None: each has what its own bounds allow."""
    providers: tuple[ProviderConfig, ...] = ()
    """Servers with OpenAI's API outside of the platform, to spill to."""
    tariffs: tuple[TariffRule, ...] = ()
    """What tenants are charged for the tokens of each model and adapter: the first that fits counts; none: nothing."""

    @property
    def num_replicas(self) -> int:
        return sum(pool.replicas for pool in self.pools)

    def __post_init__(self) -> None:
        if not self.pools:
            raise ConfigError("pools is empty: at least one pool of replicas is needed")
        for name, count in Counter(pool.name for pool in self.pools).items():
            if count > 1:
                raise ConfigError(f"{count} pools are named {name!r}: names must differ")
        self._refuse_more_than_the_budget()
        self._refuse_names_of_two_models()
        self._refuse_models_of_two_parsers()
        self._refuse_providers_without_pools()
        self._refuse_escalations_to_nowhere()

    def named_targets(self, pool: PoolConfig) -> ClassTargets:
        """Targets of a pool's requests, as far as the pool or the platform names any."""
        return self.targets.classes if pool.targets is None else pool.targets.or_else(self.targets.classes)

    @property
    def gateway_targets(self) -> GatewayTargets:
        """The platform's targets as gateways go by them: each class has one for its time to first token."""
        default = same_for_all(Target(ttft_s=self.gateway.ttft_target_s))
        return GatewayTargets(self.targets.classes.or_else(default), self.targets.objective)

    @property
    def budget_gpus(self) -> int | None:
        """GPUs that the scaled pools may take together; None: there is no bound."""
        return None if self.autoscale_budget is None else self.autoscale_budget.gpus

    def _refuse_more_than_the_budget(self) -> None:
        if self.budget_gpus is None:
            return
        scaled = [(pool, pool.autoscale) for pool in self.pools if pool.autoscale is not None and pool.counted_gpus]
        if not scaled:
            raise ConfigError("autoscale_budget is set, but no scaled pool takes a GPU (engine.device, autoscale.gpus)")
        least = sum(settings.min_replicas * pool.counted_gpus for pool, settings in scaled)
        first = sum(pool.replicas * pool.counted_gpus for pool, _ in scaled)
        for wanted, what in ((least, "autoscale.min_replicas"), (first, "replicas")):
            if wanted > self.budget_gpus:
                raise ConfigError(
                    f"autoscale_budget.gpus is {self.budget_gpus}, but {what} of the scaled pools take {wanted} GPUs "
                    "together"
                )

    def _refuse_providers_without_pools(self) -> None:
        # A request's tokens are counted before it is known who answers.
        served = {name for pool in self.pools for name in pool.names}
        for place, count in Counter(
            [*(pool.name for pool in self.pools), *(provider.name for provider in self.providers)]
        ).items():
            if count > 1:
                raise ConfigError(f"{count} pools or providers are named {place!r}: names must differ")
        for provider in self.providers:
            if self.gateway.provider_cap is not None and provider.input_price is None:
                raise ConfigError(
                    f"gateway.provider_cap is set, and providers[{provider.name!r}] has no input_price and output_price"
                )
            for name in provider.served_names:
                if name not in served:
                    raise ConfigError(f"providers[{provider.name!r}].served_names holds {name!r}, which no pool serves")

    def _refuse_escalations_to_nowhere(self) -> None:
        for pool in self.pools:
            if pool.escalation is None:
                continue
            where = f"pools[{pool.name!r}].escalation"
            if pool.tier != "edge":
                raise ConfigError(f"{where} is set, but the pool's tier is {pool.tier}: requests leave the edge only")
            for name in pool.names:
                self._refuse_escalation_of_name(pool, pool.escalation, name, where)

    def _refuse_escalation_of_name(self, pool: PoolConfig, rule: EscalationConfig, name: str, where: str) -> None:
        for other in self.pools:
            if other.tier == "edge" and name in other.names and other.escalation != rule:
                raise ConfigError(
                    f"pools {pool.name!r} and {other.name!r} serve {name!r} on the edge, but with different escalation"
                )
        places = [other.name for other in self.pools if other.tier != "edge" and name in other.names]
        places += [provider.name for provider in self.providers if name in provider.served_names]
        if not places:
            raise ConfigError(f"{where} is set, but no pool of another tier and no provider serves {name!r}")
        if rule.to is not None and rule.to not in places:
            raise ConfigError(
                f"{where}.to is {rule.to!r}, which does not serve {name!r} outside the edge; these do:"
                f" {', '.join(places)}"
            )

    def _refuse_names_of_two_models(self) -> None:
        # Inside a tier a prompt is tokenized once for all its candidate pools, and its blocks are hashed once.
        first: dict[tuple[str, str], PoolConfig] = {}
        for pool in self.pools:
            for name in pool.names:
                other = first.setdefault((name, pool.tier), pool)
                if other.model != pool.model:
                    raise ConfigError(
                        f"the served name {name!r} means {other.model!r} in pool {other.name!r} and {pool.model!r} in "
                        f"pool {pool.name!r}: "
                        "pools of one tier that share a name must share the model"
                    )
                if other.engine.block_size != pool.engine.block_size:
                    raise ConfigError(
                        f"pools {other.name!r} and {pool.name!r} share the served name {name!r} but not "
                        "engine.block_size "
                        f"({other.engine.block_size} and {pool.engine.block_size})"
                    )

    def _refuse_models_of_two_parsers(self) -> None:
        # Pools of one model and name are one route, in any tier, and a prompt is rendered once for all of them.
        first: dict[tuple[str, str], PoolConfig] = {}
        for pool in self.pools:
            for name in pool.names:
                other = first.setdefault((name, pool.model), pool)
                for setting in ("tool_parser", "reasoning_parser"):
                    theirs, ours = getattr(other, setting), getattr(pool, setting)
                    if theirs != ours:
                        raise ConfigError(
                            f"pools {other.name!r} and {pool.name!r} serve {pool.model!r} as {name!r}, but with "
                            f"different {setting} ({theirs} and {ours})"
                        )


def load_platform(path: Path) -> PlatformConfig:
    """The configuration in the file `path`. Raises ConfigError, with one sentence."""
    return load(path, PlatformConfig)


def check_memory(config: PlatformConfig, available_bytes: int) -> None:
    """Refuse KV caches that the machine can't hold together. Raises ConfigError."""
    wanted = sum(
        pool.most_replicas * pool.engine.tensor_parallel_size * pool.engine.kv_memory_bytes
        for pool in config.pools
        if pool.engine.runner == "torch"
        and pool.engine.device == "cpu"
        and isinstance(pool.engine.kv_memory_bytes, int)
    )
    if wanted > available_bytes:
        raise ConfigError(
            f"the KV caches of all replicas take {wanted / 2**30:.1f} GiB (replicas x engine.kv_memory_bytes), "
            f"more than the {available_bytes / 2**30:.1f} GiB of this machine"
        )


def check_gpus(config: PlatformConfig, available: float) -> None:
    """Refuse replicas that would wait for a GPU for ever. Raises ConfigError."""
    scaled = sum(pool.most_replicas * pool.engine.num_gpus for pool in config.pools if pool.autoscale is not None)
    fixed = sum(pool.replicas * pool.engine.num_gpus for pool in config.pools if pool.autoscale is None)
    wanted = fixed + (scaled if config.budget_gpus is None else min(scaled, config.budget_gpus))
    if wanted > available:
        raise ConfigError(
            f"engine.device: cuda gives each replica GPUs of its own, {wanted} altogether, and this machine has "
            f"{available:.0f} "
            "that Ray can see (nvidia-smi; CUDA_VISIBLE_DEVICES)"
        )


def start_timeout_s(config: PlatformConfig, usual_s: float) -> float:
    """Seconds that the replicas get to come up."""
    return max([usual_s, *(_start_timeout_s(pool.engine, usual_s) for pool in config.pools)])


def _start_timeout_s(engine: EngineConfig, usual_s: float) -> float:
    if engine.runner == "vllm":
        return engine.vllm.start_timeout_s
    return GPU_START_S if engine.device == "cuda" else usual_s


def divide_machine(config: PlatformConfig, cores: int) -> PlatformConfig:
    """The configuration for replicas that share a machine. `engine.threads` is set where it was left open: the cores
    divided among all replicas that compute, at least 1; so is `engine.memory_share`, where the CPU's memory is given
    out by it."""
    computing = sum(
        pool.most_replicas
        for pool in config.pools
        if pool.engine.runner in ("torch", "vllm") and pool.engine.device == "cpu"
    )
    num_threads, num_replicas = max(1, cores // max(1, computing)), max(1, computing)
    pools = tuple(
        msgspec.structs.replace(pool, engine=_divided(pool.engine, num_threads, num_replicas)) for pool in config.pools
    )
    return msgspec.structs.replace(config, pools=pools)


def _divided(engine: EngineConfig, num_threads: int, num_replicas: int) -> EngineConfig:
    is_shared = engine.kv_memory_bytes == "auto" and engine.device == "cpu"
    share = engine.memory_share / num_replicas if is_shared else engine.memory_share
    return msgspec.structs.replace(engine, threads=engine.threads or num_threads, memory_share=share)


def place_folders(config: PlatformConfig, state: Path) -> PlatformConfig:
    """The configuration with `adapters.folder` and `batches.folder` set, and their sections' paths absolute: processes
    of Ray have working folders of their own. state: the state folder."""
    adapters = config.adapters
    folder = Path(adapters.folder) if adapters.folder is not None else state / "adapters"
    imports = None if adapters.import_folder is None else str(Path(adapters.import_folder).expanduser().absolute())
    ca = adapters.sources.ca_file
    cas = None if ca is None else str(Path(ca).expanduser().absolute())
    placed = msgspec.structs.replace(
        adapters,
        folder=str(folder.expanduser().absolute()),
        import_folder=imports,
        sources=msgspec.structs.replace(adapters.sources, ca_file=cas),
    )
    texts = Path(config.batches.folder) if config.batches.folder is not None else state / "batches"
    batches = msgspec.structs.replace(config.batches, folder=str(texts.expanduser().absolute()))
    return msgspec.structs.replace(config, adapters=placed, batches=batches)
