"""The token stream between a router copy and a replica: msgspec messages over one `wire.channel`.

Not a transport, and not an API for tenants. Up, from router to replica, go submits and aborts; down come frames with
the deltas of all this router's sequences, block events and the replica's load. Invariant: a submitted sequence gets
exactly one delta with a `finish`, and nothing after it, unless the stream itself ends. The stream carries token ids and
never text: stop strings are found in the gateway.

Arrays of numbers travel as bytes (token ids: little-endian uint32; block keys: 16 bytes each), which costs a copy
instead of an object per element. `pack_token_ids` and `unpack_token_ids` are the only codec.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias, TypeVar

import msgspec

PROTOCOL_VERSION = 3
PREVIOUS_PROTOCOL = 2
"""The same frames after another opening; see `wire.proof`."""
KEY_BYTES = 16
"""Length of a block key; `prefix.hashing` makes them."""


class Finish(StrEnum):
    """How a sequence ended, from the engine's side."""

    STOP = "stop"
    """End-of-sequence token or one of `stop_token_ids`."""
    LENGTH = "length"
    """`max_tokens` reached, or the model's context is full."""
    ABORT = "abort"
    """The router aborted the sequence."""
    DEADLINE = "deadline"
    ERROR = "error"
    """The engine failed on the sequence; `Delta.error` describes how."""
    REFUSED = "refused"
    """Not admitted: the replica is draining, or the sequence can never fit. Another replica may be tried."""
    INVALID = "invalid"
    """The pool's engine does not support a parameter of the request, or its constraint exceeds a limit: see
    `Delta.error`."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Semantics are OpenAI's; top_k, min_p and repetition_penalty are transformers'.

    The seed is always set: the gateway draws one when the caller gave none, so that a resumed stream goes on with the
    same noise.
    """

    max_tokens: int
    """Tokens to produce at most, counted from the end of the prompt, `num_output_tokens` of a resumed sequence
    included. 0: the sequence ends when its prompt is computed."""
    seed: int = 0
    """0 <= seed < 2**63."""
    temperature: float = 1.0
    """0 is greedy: the noise is left out."""
    top_k: int = 0
    """Number of likeliest tokens to choose from; 0 is all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until that many tokens are out."""
    logprobs: int | None = None
    """Log probabilities that are wanted: None for none, 0 for the chosen token's, k for those of the k likeliest tokens
    too."""
    prompt_logprobs: int | None = None
    """Log probabilities of the prompt's own tokens: None for none, k for those of the k likeliest tokens of each place
    too. Replicas that do not publish `Ability.PROMPT_LOGPROBS` ignore it."""
    allowed_token_ids: bytes = b""
    """Packed ids of the tokens that may be chosen (see `pack_token_ids`); none: all. Needs `Ability.TOKEN_MASKS`, as
    the next one does."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of words that must not come: the last one is not chosen where the output ends in those before it."""
    num_beams: int = 0
    """Beams of a search, which needs `Ability.BEAMS`; 0: tokens are chosen one by one."""
    num_returned: int = 1
    """Answers of a search, at most `num_beams`: the best."""
    length_penalty: float = 1.0
    """Power of an answer's length by which a search divides its log probability."""
    logprobs_tokens: int = 0
    """First tokens of the output of which `logprobs` are wanted; 0: all of them are. Replicas of an earlier version,
    and pools of other engines, tell those of all."""


class Ability(StrEnum):
    """What a replica must publish for a request to be sent there that needs it; earlier versions, and pools of other
    engines, ignore such a parameter."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    """`SamplingParams.prompt_logprobs`, and `max_tokens` of 0."""
    TOKEN_MASKS = "token_masks"
    """`SamplingParams.allowed_token_ids` and `bad_words`."""
    BEAMS = "beams"
    CONSTRAINTS = "constraints"
    """`Submit.constraint`."""


def needed_abilities(params: SamplingParams) -> frozenset[Ability]:
    needed = set[Ability]()
    if params.prompt_logprobs is not None or not params.max_tokens:
        needed.add(Ability.PROMPT_LOGPROBS)
    if params.allowed_token_ids or params.bad_words:
        needed.add(Ability.TOKEN_MASKS)
    if params.num_beams:
        needed.add(Ability.BEAMS)
    return frozenset(needed)


def needs_sampling(params: SamplingParams) -> bool:
    """Whether choosing a token takes more than finding the largest logit: what cuts or changes them, or log
    probabilities. A temperature alone hardly does; `min_tokens` and `logprobs_tokens`, which end soon, are not
    counted."""
    return bool(
        (params.temperature and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0))
        or (params.logprobs is not None and not params.logprobs_tokens)
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.num_beams
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What the text of an answer must be, from its first token to its last."""

    kind: str
    """One of json_schema, regex, grammar and choice; an unknown one is refused by the replica."""
    text: str
    """json_schema: the schema, a JSON object; regex: a regular expression by the syntax of Rust's crate `regex`, which
    the whole answer matches; grammar: a Lark grammar by llguidance's syntax; choice: a JSON array of strings, one of
    which is the answer."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A request for one sequence."""

    sid: int
    """Number that the router gives the sequence, from 1 and rising on this stream; deltas carry it back."""
    request_id: str
    packed_token_ids: bytes
    """Ids of the prompt, and behind them the output so far when a sequence is resumed; see `pack_token_ids`."""
    block_keys: bytes
    """Keys of the full blocks of these tokens, in order."""
    chain_key: bytes
    """The parent key from which the block after the last one in `block_keys` is hashed (salt already mixed in)."""
    sampling: SamplingParams
    num_output_tokens: int = 0
    """How many of the last token ids are output already: penalties and max_tokens count them."""
    adapter: str | None = None
    """Digest of the LoRA adapter; None: the base model."""
    tenant: str = ""
    deadline: float | None = None
    """Unix time, seconds, by the gateway's clock; for replicas that know no `seconds_left`."""
    traceparent: str | None = None
    """W3C Trace Context of the request's span; None: the request is not traced, and its deltas have no `timing`."""
    seconds_left: float | None = None
    """Time until the sequence ends unfinished, from the sending of this message: the clocks of two machines need not
    agree. None: the gateway is of a version that sends `deadline` alone."""
    service_class: str = "standard"
    """Class of the tenant's requests: interactive, standard or batch. An unknown one counts as standard."""
    weight: float = 0.0
    """Weight of the tenant, that of its class included, by which the replica divides the rows of its steps; 0: it goes
    by arrival, as for gateways that know no weights."""
    cache_scope: str = ""
    """Part of the tenant's requests that share KV, for engines that do not go by `block_keys`; empty: all of them."""
    constraint: Constraint | None = None
    """What the answer must be; None: anything. A replica of an earlier version ignores it, so it is sent only to those
    that publish `Ability.CONSTRAINTS`."""
    prediction: bytes = b""
    """Packed ids of what the answer may be, from its first token on: drafts; who does not speculate ignores it."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Drop a sequence: its KV is released within a step. Unknown sids are ignored (it may just have finished)."""

    sid: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """First message of a router of the previous version on a new stream; see `wire.proof`."""

    router_id: str
    protocol: int = PREVIOUS_PROTOCOL
    proof: bytes = b""
    """Proof that the router knows the cluster secret; see `wire.proof`."""


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Ask the replica for a snapshot of every block it holds: the answer to a gap in the events."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Load an adapter now, if there is a slot that no sequence needs; the next `Load` reports show the outcome."""

    digest: str
    tenant: str = ""
    """The tenant whose request is about to come; it gets a slot by the rules of its requests. Empty: no request is
    known of, and any idle adapter makes room."""


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Unload an adapter that no request will name any more: sequences with it finish, then its slot is free."""

    digest: str


Op: TypeAlias = Submit | Abort | Hello | Announce | LoadAdapter | DropAdapter
"""What a router may ask of a replica."""


class UpFrame(msgspec.Struct, frozen=True, array_like=True):
    """One message from a router to a replica."""

    ops: list[Op]
    """Operations in the order in which they are to be done."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms, of the distribution before temperature and truncation (OpenAI's and vLLM's choice)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, logprob), best first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of N tokens of a prompt, each given all tokens before it, as little-endian numbers:
    arrays cost a copy instead of an object per element. The first token of a prompt has none."""

    num_top: int
    """Likeliest tokens of each place, k."""
    logprobs: bytes = b""
    """float32 [N]: natural logarithms, as of `TokenLogprobs`."""
    ranks: bytes = b""
    """uint32 [N]: 1 for the likeliest token."""
    top_ids: bytes = b""
    """uint32 [N, k]: the likeliest tokens of each place, best first."""
    top_logprobs: bytes = b""
    """float32 [N, k]."""

    @property
    def num_tokens(self) -> int:
        return len(self.ranks) // 4


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Times at which a traced sequence was computed, by the engine's clock: Unix time, seconds."""

    wait_s: float
    """Seconds in the replica before the first step that computed the sequence."""
    admitted_s: float
    """Beginning of that step."""
    first_token_s: float
    last_token_s: float
    """Time of the newest token so far."""
    num_preemptions: int = 0


class BeamOutput(msgspec.Struct, frozen=True, array_like=True):
    """An answer that a search has found."""

    token_ids: list[int]
    finish: Finish
    logprobs: list[TokenLogprobs] | None = None


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence gained since its last delta."""

    sid: int
    token_ids: list[int]
    finish: Finish | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was found in the cache; on the first delta only."""
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    timing: Timing | None = None
    """Times of a traced sequence; on its first and its last delta only."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt, where they are wanted; on the first delta only, so that whoever has a token has
    these too."""
    beams: list[BeamOutput] | None = None
    """The answers of a search, the best first, on its last delta; `token_ids` is empty in all of them."""
    num_beam_tokens: int = 0
    """Tokens that the search has computed so far in all its beams; less than before where it had to start over."""
    step_s: float = 0.0
    """Seconds of the replica's steps that are this sequence's share, so far: on every delta, and never less than
    before. A replica of an earlier version does not tell."""


class BlockEvents(msgspec.Struct, frozen=True, array_like=True):
    """What the replica's cache gained and lost. Consecutive `event_seq` numbers; a gap means something was missed.

    `is_snapshot`: `stored` is all the replica holds as of `event_seq`, and replaces what was known.
    """

    event_seq: int
    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


class Stairs(msgspec.Struct, frozen=True, array_like=True):
    """What a device that replays recorded steps adds to the line of `StepCosts`: a step takes as long as the recording
    that it fits into, and one that is not recorded no less than its launches."""

    recorded_rows: int
    """Most sequences of a recorded step."""
    recorded_tokens: int = 0
    """Most tokens of a recorded step that computes more than a token of each sequence; 0: none is recorded."""
    eager_knee_s: float = 0.0
    """Shortest time of a step that is not recorded."""
    cliffs: tuple[tuple[int, float], ...] = ()
    """Numbers of tokens, ascending, and the seconds by which a step of more tokens than that takes longer."""


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Coefficients of the performance model (seconds); see `penstock.perf.model`."""

    base_s: float = 0.0
    """Fixed cost of a step."""
    row_s: float = 0.0
    """Cost of each sequence in the step."""
    prefill_token_s: float = 0.0
    """Cost of each prompt token computed in the step."""
    attention_s: float = 0.0
    """Cost of each pair of a query token and a context token."""
    kv_token_s: float = 0.0
    """Cost of each context token read by decode rows."""
    draft_token_s: float = 0.0
    """Cost of each drafted token that is verified."""
    draft_round_s: float = 0.0
    """Cost of each pass of the drafter over the step's rows: as many passes as the longest draft has tokens."""
    knee_s: float = 0.0
    """Shortest time of a step, whatever it holds."""
    sampled_row_s: float = 0.0
    """Cost of each row whose token takes more than its largest logit; see `needs_sampling`."""
    stairs: Stairs | None = None
    """None: the device records no steps, or the replica is of an earlier version."""


class AdapterCount(msgspec.Struct, frozen=True, array_like=True):
    """What has become of an adapter since the replica's start, as far as a tenant had to do with it."""

    digest: str
    tenant: str
    """Empty: loaded before any request, or gone without one."""
    num_hits: int
    """Sequences that found it in a slot."""
    num_waits: int
    """Sequences that had to wait for it."""
    num_loads: int
    num_evictions: int
    """Times that it left a slot."""


class TimeAccounts(msgspec.Struct, frozen=True, array_like=True):
    """Where a replica's time has gone since its process began, seconds: each second of it is in one account."""

    start_s: float = 0.0
    """Loading, measuring, whatever came before it served."""
    steps_s: float = 0.0
    """Steps, whose time is divided among their sequences."""
    idle_s: float = 0.0
    drain_s: float = 0.0
    """Refusing new work, and with none left."""
    failed_s: float = 0.0
    """Steps of which nothing came."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A replica's report of its true load, all routers' traffic included."""

    epoch: str
    event_seq: int
    """Number of the last block event sent on this stream before this report."""
    max_inflight: int
    """Credit: live sequences this router may have here at once."""
    num_running: int
    num_waiting: int
    prefill_tokens_outstanding: int
    kv_tokens: int
    """Context tokens of the running sequences, summed."""
    free_blocks: int
    total_blocks: int
    costs: StepCosts
    max_batched_tokens: int
    is_draining: bool = False
    resident_adapters: tuple[str, ...] = ()
    last_sid: int = 0
    """Highest sid received on this stream before this report: what the router sent after it is not in these numbers. 0:
    none yet, or the replica does not report it."""
    num_drafted: int = 0
    """Draft tokens verified since the replica's start."""
    num_accepted: int = 0
    """Draft tokens accepted since the replica's start: the model would have chosen the same."""
    failed_adapters: tuple[tuple[str, str], ...] = ()
    """Adapters that could not be loaded lately, each with a sentence."""
    num_sampled: int = 0
    """Running sequences whose rows cost `StepCosts.sampled_row_s`; a replica of an earlier version does not tell."""
    num_compiled: int = 0
    """Kernels compiled since the replica was ready; a replica of an earlier version does not tell."""
    adapter_totals: tuple[int, ...] = ()
    """Sequences that found their adapter in a slot, sequences that had to wait for theirs, loads, and evictions, since
    the replica's start. Empty: no adapter is served, or the replica is of an earlier version."""
    adapter_counts: tuple[AdapterCount, ...] = ()
    """Counts of adapters that changed since the last report on this stream."""
    accounts: TimeAccounts | None = None
    """None: the replica is of an earlier version."""
    max_running: int = 0
    """Sequences that may run at once; 0: the replica is of an earlier version."""
    row_hold_s: float = 0.0
    """Mean seconds for which the sequences that ended lately were among the running ones; 0: none has ended."""


class DownFrame(msgspec.Struct, frozen=True, array_like=True):
    """One message from a replica to a router."""

    deltas: list[Delta]
    load: Load | None = None
    events: list[BlockEvents] | None = None
    error: str | None = None
    """Reason for which the replica ends the stream with this frame; None: it goes on."""


_encoder = msgspec.msgpack.Encoder()
Frame = TypeVar("Frame", UpFrame, DownFrame)

_up_decoder = msgspec.msgpack.Decoder(UpFrame)
_down_decoder = msgspec.msgpack.Decoder(DownFrame)


def encode(frame: UpFrame | DownFrame) -> bytes:
    return _encoder.encode(frame)


def decode_up(data: bytes) -> UpFrame:
    """Raises msgspec.DecodeError for bytes that are no frame of a router."""
    return _decode(_up_decoder, data)


def decode_down(data: bytes) -> DownFrame:
    """Raises msgspec.DecodeError for bytes that are no frame of a replica."""
    return _decode(_down_decoder, data)


def _decode(decoder: "msgspec.msgpack.Decoder[Frame]", data: bytes) -> Frame:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # what msgspec leaves as it is
        raise msgspec.DecodeError(f"no frame: {error}") from error


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(data: bytes) -> list[int]:
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tolist()


def unpack_floats(data: bytes) -> list[float]:
    packed = array("f")
    packed.frombytes(data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tolist()


def join_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Consecutive parts with as many likeliest tokens each, as one; None for no part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return PromptLogprobs(
        parts[0].num_top,
        b"".join([part.logprobs for part in parts]),
        b"".join([part.ranks for part in parts]),
        b"".join([part.top_ids for part in parts]),
        b"".join([part.top_logprobs for part in parts]),
    )


def split_keys(data: bytes) -> list[bytes]:
    """The 16-byte keys that `data` is the concatenation of."""
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
