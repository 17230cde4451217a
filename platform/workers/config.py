"""Settings of a pool's engine: the part `engine:` of a pool's configuration. Loaded once at start, never changed;
unknown keys and impossible values are refused with a sentence."""

from typing import Any, Literal

import msgspec

from penstock.base.errors import ConfigError
from penstock.wire.frames import StepCosts

MAX_STREAM_INTERVAL_S = 0.04
"""A load goes to each gateway that often, and takes along the tokens that are held."""
MAX_DRAFT_TOKENS = 16
"""Largest `max_draft_tokens` that a configuration may set."""
DEVICE_DEFAULTS: dict[str, dict[str, int | str]] = {
    "cpu": {"kv_memory_bytes": 512 * 2**20, "max_num_seqs": 64, "max_batched_tokens": 512},
    "cuda": {"kv_memory_bytes": "auto", "max_num_seqs": 256, "max_batched_tokens": "auto"},
}
"""Values of settings that are not given, by `device`."""
LEAST_AUTO_TOKENS, MOST_AUTO_TOKENS = 2048, 8192
"""Bounds of the budget that `max_batched_tokens: auto` finds."""
MAX_TENSOR_PARALLEL = 64
"""Largest `tensor_parallel_size` that a configuration may set: more GPUs than one machine has."""
OWN_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments of vLLM's that set how many GPUs it takes."""


class TimedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Step times of the timed runner: a table, or constants. Seconds."""

    base_s: float = 0.010
    """Fixed part of a step, seconds."""
    row_s: float = 0.0
    """Time of each decode row, seconds."""
    prefill_token_s: float = 0.0
    """Time of each prompt token, seconds."""
    kv_token_s: float = 0.0
    """Time of each context token that the decode rows read, seconds."""
    draft_token_s: float = 0.0
    """Time of each draft token, seconds."""
    draft_acceptance: float = 0.7
    """Share of the draft tokens that are right, 0 to 1; used with speculation only."""
    table: str | None = None
    """Path of a measured step table (JSON), instead of the constants."""
    vocab_size: int = 49152
    """Number of token ids; the runner chooses among 0 to `vocab_size` - 1."""
    answers: Literal["tokens", "words"] = "tokens"
    """What the runner chooses among: all those ids, or only those of whole words, so that an answer's text tokenizes
    back to the same ids, as a real model's nearly always does, and the next turn of a conversation finds it cached."""
    num_blocks: int = 4096
    """KV blocks that the replica pretends to have."""
    max_model_len: int = 8192
    """Longest sequence, prompt and output, in tokens."""

    @property
    def costs(self) -> StepCosts:
        return StepCosts(
            base_s=self.base_s,
            row_s=self.row_s,
            prefill_token_s=self.prefill_token_s,
            kv_token_s=self.kv_token_s,
            draft_token_s=self.draft_token_s,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.draft_acceptance <= 1:
            raise ConfigError(f"engine.timed.draft_acceptance is a share between 0 and 1, not {self.draft_acceptance}")


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens guessed ahead and verified in one step. Changes when an answer comes, never its tokens."""

    method: Literal["none", "ngram", "draft", "head"] = "none"
    """Kind of drafter. ngram: finds what followed the last tokens where they stood before. draft: a smaller model.
    head: one layer that reads what the model itself has computed, made by penstock train-drafter, and what ngram finds
    where that is likelier; on the CPU."""
    model: str | None = None
    """Draft model of `method: draft`, written like a pool's model; it must have the same vocabulary. The pool's own is
    allowed."""
    head: str | None = None
    """The file of `method: head`; demo: the one that comes with Penstock, for the demo model."""
    draft_layers: int | None = None
    """Number of the draft model's first layers that are used, 1 or more; None: all."""
    max_draft_tokens: int = 4
    """Most tokens guessed for one sequence in a step, 1 to MAX_DRAFT_TOKENS."""
    adaptive: bool = True
    """Whether fewer tokens, down to none, are guessed where they do not pay; False: always as many as there is room
    for."""

    def __post_init__(self) -> None:
        if (self.method == "draft") != (self.model is not None):
            raise ConfigError(
                "engine.speculation.model names the draft model of method: draft; "
                f"with method: {self.method} it is {self.model}"
            )
        if (self.method == "head") != (self.head is not None):
            raise ConfigError(
                f"engine.speculation.head names the file of method: head; with method: {self.method} it is {self.head}"
            )
        if self.draft_layers is not None and (self.method != "draft" or self.draft_layers < 1):
            raise ConfigError(
                "engine.speculation.draft_layers is a number of layers of a draft model, 1 or more, "
                f"not {self.draft_layers} with {self.method}"
            )
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"engine.speculation.max_draft_tokens must be between 1 and {MAX_DRAFT_TOKENS}, "
                f"not {self.max_draft_tokens}"
            )


class VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM in an environment of its own, as a child process of each replica."""

    python: str | None = None
    """Interpreter of that environment; None: what PENSTOCK_VLLM_PYTHON names."""
    args: dict[str, Any] = {}
    """More of vLLM's EngineArgs, by their names there (enforce_eager, quantization, ...); they win over what follows
    from the other settings. None of OWN_SIZES, for which nobody would reserve GPUs."""
    start_timeout_s: float = 600.0
    """Time that vLLM gets to load, compile and be measured, seconds; more than 0."""

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ConfigError(f"engine.vllm.start_timeout_s must be more than 0, not {self.start_timeout_s}")
        for name in OWN_SIZES:
            if name in self.args:
                raise ConfigError(
                    f"engine.vllm.args.{name} can't be set: a replica takes engine.tensor_parallel_size GPUs, "
                    "and no others are reserved for it"
                )


class AdapterSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """LoRA adapters in a replica's memory. They cost nothing while no request names one."""

    slots: int = 8
    """Adapters resident at once; a request for another one waits until one of them makes room, by the rules of
    `workers.serving.residency`. 0: this pool serves no adapters."""
    max_rank: int = 32
    """Highest rank of an adapter; a higher one is refused. An adapter takes about rank x the sum of inputs and outputs
    of the linear layers it adapts."""
    host_bytes: int = 256 * 2**20
    """Bytes of host memory for adapters that were read and checked, so that one which left its slot comes back without
    its files being read again. On a CPU, those in slots are the same memory. 0: none are held. For our own engine; not
    where a model is in parts."""

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise ConfigError(f"engine.adapters.slots must be at least 0, not {self.slots}")
        if self.max_rank < 1:
            raise ConfigError(f"engine.adapters.max_rank must be at least 1, not {self.max_rank}")
        if self.host_bytes < 0:
            raise ConfigError(f"engine.adapters.host_bytes must be at least 0, not {self.host_bytes}")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a replica's engine, the same for all replicas of a pool."""

    runner: Literal["torch", "timed", "vllm"] = "torch"
    """What computes. torch: our own engine with the model. timed: our own engine with made-up tokens in steps of a
    given time. vllm: vLLM."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it computes. cuda: each replica has `tensor_parallel_size` GPUs of its own."""
    tensor_parallel_size: int = 1
    """Parts that a replica's model is divided into, each computed by a process of its own, with a GPU of its own on
    device: cuda; 1 to MAX_TENSOR_PARALLEL. 1: the model is whole."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that the weights are kept and multiplied in. auto: bfloat16 where the device computes in it, or our CPU
    kernels serve, which read it and compute in float32; else float32."""
    lm_head: Literal["auto", "keep", "int8", "int4"] = "auto"
    """How the output head and the embedding table are held, which are most of a small model. keep: as the checkpoint
    has them. int8, int4: rounded to nearest in groups of 32. auto: int8 where the checkpoint's other matrices are
    quantized and these are not, else keep."""
    activations: Literal["auto", "bf16", "int8", "int16"] = "auto"
    """What quantized matrices are multiplied with, on the CPU. int8: whole steps of 8 bits, with a scale per row and
    group: quickest, for some 0.4 % of perplexity. int16: in two terms of 8 bits, with a scale per row; from 16 rows on
    in bfloat16 where the CPU multiplies that. auto: for up to 4 rows, and in steps that read a prompt of fewer than 128
    tokens (two of them or more), int8 with a second term for the four neighbouring columns of each 32 that hold the
    largest activation (without AVX-512 VNNI int16); else int8; so close calls between tokens may depend on what runs
    beside a request, unless `exact`. bf16: not rounded (to bfloat16, where the CPU multiplies that)."""
    kv_dtype: Literal["auto", "bf16", "int8", "fp8"] = "auto"
    """Type of the cached keys and values. auto: that of the computation. int8 on the CPU, fp8 (e4m3) on a GPU: with a
    scale for each token's head, half of bf16's memory."""
    exact: bool = False
    """Bit-identical output whatever runs beside a request; slower."""
    threads: int | None = None
    """CPU threads of one replica; None: under `penstock up` the machine's cores divided by the replicas on it,
    elsewhere all that the container has."""
    block_size: int = 16
    """Tokens in a KV block, a power of two."""
    kv_memory_bytes: int | Literal["auto"] = None  # type: ignore[assignment]  # see DEVICE_DEFAULTS
    """Size of one replica's KV cache, in the memory of its device; of each device, where it has several. auto: what
    `memory_share` leaves beside everything else. By default 512 MiB on a CPU, auto on a GPU."""
    memory_share: float = 0.9
    """Share of the memory that a replica may take with kv_memory_bytes: auto, more than 0, at most 1: of a GPU's; on
    a CPU of what the container may take, or the machine has available, which `penstock up` divides by the replicas on
    it."""
    max_num_seqs: int = None  # type: ignore[assignment]  # see DEVICE_DEFAULTS
    """Sequences running at once; by default 64 on a CPU, 256 on a GPU."""
    max_batched_tokens: int | Literal["auto"] = None  # type: ignore[assignment]  # see DEVICE_DEFAULTS
    """Token budget of a step: decode rows first, then prefill chunks. auto: as many as the GPU computes in a tenth of a
    second and has room for, LEAST_AUTO_TOKENS to MOST_AUTO_TOKENS. By default 512 on a CPU, auto on a GPU,
    LEAST_AUTO_TOKENS with vLLM on a GPU."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output, in tokens; None: what the checkpoint allows, as far as the KV cache holds
    it."""
    admission_lookahead: int | None = None
    """Sequences granted to routers beyond max_num_seqs, so that a freed place is filled without a round trip, and a
    tenant with less than its share finds a place at once; None: a twelfth of max_num_seqs, 4 at the least."""
    overlap: bool = True
    """Whether a GPU gets the next step before a step has ended. False: one after the other, for whoever looks for a
    fault; slower, same tokens. Of no meaning on a CPU, whose steps never overlap."""
    stream_interval_s: float = 0.005
    """Time for which tokens are held so that they go to one gateway together, 0 to 0.04. More than the time of a step:
    tokens of several steps make fewer messages and events. The first and last tokens of an answer wait 5 ms at most;
    whatever goes to that gateway takes along what is held: another answer's ends, and the load, every 40 ms."""
    keep_tpot: bool = True
    """Whether steps keep the pool's targets of `tpot_s`: no more rows and no longer pieces of prompts than leave the
    strictest class that is answered in time, batch rows last. False: steps are as full as they can be, and targets are
    measured only. Of no meaning without such a target, and with vLLM."""
    stall_s: float = 60.0
    """A step that takes longer than this fails the health check, and Serve replaces the replica."""
    speculation: SpeculationConfig = msgspec.field(default_factory=SpeculationConfig)
    adapters: AdapterSlots = msgspec.field(default_factory=AdapterSlots)
    timed: TimedConfig = msgspec.field(default_factory=TimedConfig)
    vllm: VllmConfig = msgspec.field(default_factory=VllmConfig)

    @property
    def num_places(self) -> int:
        """Sequences that may be in the engine at once, waiting ones included."""
        lookahead = self.admission_lookahead
        return self.max_num_seqs + (max(4, self.max_num_seqs // 12) if lookahead is None else lookahead)

    @property
    def token_budget(self) -> int:
        """`max_batched_tokens`, when it has been chosen: `compute.token_budget` does that where it is auto."""
        assert isinstance(self.max_batched_tokens, int), "nobody has chosen the token budget of a step yet"
        return self.max_batched_tokens

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that one replica takes."""
        return self.tensor_parallel_size if self.device == "cuda" else 0

    def __post_init__(self) -> None:
        for name, value in DEVICE_DEFAULTS[self.device].items():
            if getattr(self, name) is None:
                is_vllms_budget = name == "max_batched_tokens" and self.runner == "vllm" and value == "auto"
                msgspec.structs.force_setattr(self, name, LEAST_AUTO_TOKENS if is_vllms_budget else value)
        self._check_parts()
        for name in ("block_size", "kv_memory_bytes", "max_num_seqs", "max_batched_tokens"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.stream_interval_s <= MAX_STREAM_INTERVAL_S:
            bounds = f"0..{MAX_STREAM_INTERVAL_S:g}"
            raise ConfigError(f"engine.stream_interval_s must lie in {bounds}, not {self.stream_interval_s}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"engine.memory_share must be more than 0 and at most 1, not {self.memory_share}")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"engine.block_size must be a power of two, not {self.block_size}")
        if self.device == "cuda" and self.runner == "torch" and not 8 <= self.block_size <= 128:
            raise ConfigError(f"engine.block_size must be from 8 to 128 for device: cuda, not {self.block_size}")
        if self.max_batched_tokens == "auto":
            if self.runner == "vllm" or self.device == "cpu":
                raise ConfigError("engine.max_batched_tokens: auto is for our own engine on a GPU; give a number")
        elif self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_batched_tokens ({self.max_batched_tokens}) must be at least engine.max_num_seqs "
                f"({self.max_num_seqs}): a step must hold a row of every sequence"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"engine.threads must be at least 1, not {self.threads}")
        if self.device != "cpu" and self.runner == "timed":
            raise ConfigError(f"engine.device: {self.device} is for a runner that computes; runner: timed sleeps")
        if self.device != "cpu" and self.exact:
            raise ConfigError(
                "engine.exact: true is for device: cpu; on a GPU it has not been shown, "
                f"so it can't be combined with device: {self.device}"
            )
        if self.kv_dtype == {"cpu": "fp8", "cuda": "int8"}[self.device]:
            raise ConfigError(
                f"engine.kv_dtype: {self.kv_dtype} is not for device: {self.device}; "
                "8-bit keys and values are int8 on the CPU, fp8 on a GPU"
            )
        if self.activations in ("int8", "int16") and (
            self.device != "cpu" or self.exact or self.dtype == "float32" or self.runner == "vllm"
        ):
            raise ConfigError(
                f"engine.activations: {self.activations} is for our own engine on device: cpu, "
                "and neither for exact: true nor for dtype: float32"
            )
        if self.activations == "bf16" and self.runner == "vllm":
            raise ConfigError("engine.activations: bf16 is for our own engine; engine.vllm.args can set vLLM's")
        if self.runner == "vllm" and self.kv_dtype != "auto":
            raise ConfigError(
                f"engine.kv_dtype: {self.kv_dtype} is for our own engine; engine.vllm.args can set vLLM's"
            )
        if self.runner == "vllm" and self.exact:
            raise ConfigError("engine.exact: true is what our own engine can do; runner: vllm can't")
        if self.runner == "vllm" and not self.overlap:
            raise ConfigError("engine.overlap: false is for our own engine; engine.vllm.args can set vLLM's")
        if self.runner == "vllm" and self.lm_head in ("int8", "int4"):
            raise ConfigError(
                f"engine.lm_head: {self.lm_head} is for our own engine; runner: vllm takes the checkpoint as it is"
            )
        if self.runner == "vllm" and self.speculation.method != "none":
            raise ConfigError(
                f"engine.speculation.method: {self.speculation.method} is for our own engine; "
                "engine.vllm.args can set vLLM's"
            )

    def _check_parts(self) -> None:
        size = self.tensor_parallel_size
        if not 1 <= size <= MAX_TENSOR_PARALLEL:
            raise ConfigError(f"engine.tensor_parallel_size must be between 1 and {MAX_TENSOR_PARALLEL}, not {size}")
        if size == 1:
            return
        if self.runner == "timed":
            raise ConfigError(f"engine.tensor_parallel_size: {size} is for a runner that computes, and timed sleeps")
        if self.exact:
            raise ConfigError(
                f"engine.exact: true needs the whole model in one process, not engine.tensor_parallel_size: {size}: "
                "sums over processes depend on what else is in a step"
            )
        if self.activations != "auto":
            raise ConfigError(
                f"engine.activations: {self.activations} is for the kernels that compute a whole model on a CPU, "
                f"not for engine.tensor_parallel_size: {size}"
            )
