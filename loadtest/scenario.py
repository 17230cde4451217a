"""A scenario: everything that defines a load, from one YAML file. Unknown keys and impossible combinations are refused
with a sentence.

Every part checks itself when it is made, from a file or in code; a ValueError's message begins with the key. Not here:
where the server is, and keys (`target.py`): the same scenario can be run against any server.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec
import yaml

from penstock_loadtest.checks import require, require_above_zero, require_not_negative, show
from penstock_loadtest.errors import ScenarioInvalid
from penstock_loadtest.overrides import override, resolve_path
from penstock_loadtest.planned import Endpoint

EXAMPLES: Final = Path(__file__).parent / "scenarios"


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a scenario."""


class Lengths(Struct, frozen=True):
    """A distribution of token counts or seconds: a constant, uniform between two, lognormal by median and p99, or the
    values of a list, equally likely."""

    constant: float | None = None
    uniform: tuple[float, float] | None = None
    lognormal: tuple[float, float] | None = None  # median, p99
    choices: list[float] | None = None
    min: float = 0.0  # draws are clipped to min..max
    max: float = float("inf")

    def __post_init__(self) -> None:
        ways = {
            "constant": self.constant,
            "uniform": self.uniform,
            "lognormal": self.lognormal,
            "choices": self.choices,
        }
        given = [name for name, value in ways.items() if value is not None]
        require(
            len(given) == 1,
            f"{' and '.join(given) or 'constant'} {'are' if given else 'is not'} set; it must be exactly one of "
            f"{', '.join(ways)}",
        )
        way = ways[given[0]]
        values = list(way) if isinstance(way, tuple | list) else [way or 0.0]
        require(len(values) > 0, f"{given[0]} is empty")
        require(
            all(0 <= value < math.inf for value in values),
            f"{given[0]} is {show(way)}; it can't be negative or infinite",
        )
        require(
            given[0] != "uniform" or values[0] <= values[1],
            f"uniform is {show(way)}; the first must not be above the second",
        )
        require(
            given[0] != "lognormal" or 0 < values[0] <= values[1],
            f"lognormal is {show(way)}; it is the median, above 0, then the 99th percentile",
        )
        require_not_negative(self, "min")
        require(self.min <= self.max, f"min is {self.min:g}, above max, {self.max:g}")


class Arrivals(Struct, frozen=True):
    """Intended times of the open loop. `rate` is requests per second; every process but `gamma` bursts as Poisson
    does, `constant` not at all."""

    process: Literal["constant", "poisson", "gamma", "step", "ramp", "spike"] = "poisson"
    rate: float = 1.0
    cv: float = 1.0  # gamma: coefficient of variation of the gaps; above 1 is burstier than Poisson
    to_rate: float | None = None  # step, ramp, spike: the other rate
    at_s: float | None = None  # step: when the rate changes; spike: when it begins; None: a third of the duration
    # ramp: time from rate to to_rate, None: the duration; spike: its length, None: a sixth of the duration
    length_s: float | None = None

    def __post_init__(self) -> None:
        is_changing = self.process in ("step", "ramp", "spike")
        if is_changing:
            require_not_negative(self, "rate", "to_rate")
            require(self.to_rate is not None, f"to_rate is missing; process {self.process} needs the other rate")
            require(self.rate > 0 or (self.to_rate or 0.0) > 0, "rate and to_rate are both 0; one must be above it")
        require(is_changing or self.to_rate is None, f"to_rate is for step, ramp and spike, not for {self.process}")
        if not is_changing:
            require_above_zero(self, "rate")
        require_above_zero(self, "cv", "length_s")
        require(
            self.process == "gamma" or self.cv == 1.0,
            f"cv is for gamma; {self.process} can't have another than its own",
        )
        require_not_negative(self, "at_s")
        require(
            self.at_s is None or self.process in ("step", "spike"),
            f"at_s is for step and spike, not for {self.process}",
        )
        require(
            self.length_s is None or self.process in ("ramp", "spike"),
            f"length_s is for ramp and spike, not for {self.process}",
        )


class Trace(Struct, frozen=True):
    """A published trace to replay: its arrivals and lengths take the place of `arrivals`, `prompt_tokens` and
    `output_tokens`.

    In the closed loop its requests go one behind the other, without their times.
    """

    format: Literal["mooncake", "azure", "burstgpt", "servegen"]
    path: Path  # .gz is read as it is
    time_scale: float = 1.0  # 0.5: twice as fast
    token_scale: float = 1.0  # lengths and prefix blocks are multiplied by it (a small model's context)
    max_prompt_tokens: int | None = None  # longer requests are cut to it (after scaling)
    max_output_tokens: int | None = None
    start_s: float = 0.0  # part of the trace that is replayed, in its own seconds after its first row
    end_s: float = float("inf")
    rate: float | None = None  # servegen client rates: thin or thicken to this mean rate
    lengths: Path | None = None  # servegen client rates: the table of lengths beside it

    def __post_init__(self) -> None:
        require_above_zero(self, "time_scale", "token_scale", "max_prompt_tokens", "max_output_tokens", "rate")
        require_not_negative(self, "start_s")
        require(self.start_s < self.end_s, f"start_s is {self.start_s:g}, not before end_s, {self.end_s:g}")
        for key in ("rate", "lengths"):
            require(
                getattr(self, key) is None or self.format == "servegen",
                f"{key} is for ServeGen's client rates, not for {self.format}",
            )


class Prompts(Struct, frozen=True):
    """Where prompts come from."""

    # made-up words; random token ids (completions only); real text
    source: Literal["words", "tokens", "corpus"] = "words"
    # corpus: JSON lines (field `prompt`, `question`, `text` or `turns`) or plain text; .gz as it is
    path: Path | None = None
    # length of a whole prompt; corpus: plain text is cut to it, JSON lines go as they are
    tokens: Lengths = Lengths(constant=256)
    # so many leading tokens are the same in every prompt of a group; at least one of its own follows
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1
    token_range: tuple[int, int] = (300, 30000)  # ids drawn for `tokens`: from the first, below the second
    # tokenizer.json: made-up text gets exact token counts; without: about one token a word
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        require(self.source != "corpus" or self.path is not None, "path is missing; source corpus needs a file of text")
        require(
            self.source == "corpus" or self.path is None,
            f"path is for source corpus; source {self.source} reads no file",
        )
        require(
            self.source != "tokens" or self.tokenizer is None, "tokenizer is for text; source tokens sends token ids"
        )
        require_not_negative(self, "shared_prefix_tokens")
        require_above_zero(self, "prefix_groups")
        low, high = self.token_range
        require(0 <= low < high, f"token_range is {low}, {high}; the first must be 0 or more, and below the second")


class Sessions(Struct, frozen=True):
    """Conversations: arrivals start sessions, later turns follow the real answers."""

    turns: Lengths = Lengths(constant=1)
    think_s: Lengths = Lengths(constant=1)
    system_tokens: int = 0  # system message, the same in all sessions

    def __post_init__(self) -> None:
        require_not_negative(self, "system_tokens")


class Kind(Struct, frozen=True):
    """One kind of request of a mixed load."""

    name: str = "requests"
    weight: float = 1.0
    endpoint: Endpoint = "chat"
    stream: bool = True
    prompts: Prompts = Prompts()
    output_tokens: Lengths = Lengths(constant=64)
    ignore_eos: bool = False
    temperature: float = 0.0
    seeded: bool = True  # with temperature: a seed of its own for every request
    sessions: Sessions | None = None

    def __post_init__(self) -> None:
        require(self.name != "", "name is empty")
        require_not_negative(self, "weight", "temperature")
        is_completions = self.endpoint == "completions"
        require(
            is_completions or self.prompts.source != "tokens",
            "prompts.source is tokens; only endpoint completions takes token ids",
        )
        require(
            not is_completions or self.sessions is None,
            "sessions need endpoint chat; completions have no messages to go on from",
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether the same request must have the same answer: greedy, or with a seed."""
        return self.temperature == 0 or self.seeded


class Share(Struct, frozen=True):
    """A tenant or model and its share of the requests."""

    name: str
    weight: float = 1.0
    key_env: str | None = None  # tenants: the environment variable that holds the key; None: OPENAI_API_KEY

    def __post_init__(self) -> None:
        require(self.name != "", "name is empty")
        require_not_negative(self, "weight")


class Cancel(Struct, frozen=True):
    share: float = 0.0  # of requests that hang up early
    after_s: Lengths = Lengths(uniform=(0.0, 2.0))

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"share is {self.share:g}; it must be from 0 to 1")


class Targets(Struct, frozen=True):
    """Latencies that a request must meet to count as goodput."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2

    def __post_init__(self) -> None:
        require_above_zero(self, "ttft_s", "tpot_s")


class Scenario(Struct, frozen=True):
    name: str = "load"
    seed: int = 0
    loop: Literal["open", "closed"] = "open"
    duration_s: float | None = 60.0  # no new requests after it; None: until `requests`, or the trace's end
    requests: int | None = None  # no more than so many
    warmup_s: float = 0.0  # requests intended earlier are made, and left out of the summary
    drain_s: float = 60.0  # after the last request has left, wait so long for answers; then they are unfinished
    timeout_s: float = 600.0  # of one request, from its intended time
    concurrency: int = 8  # closed loop: requests at once
    arrivals: Arrivals = Arrivals()
    trace: Trace | None = None
    kinds: list[Kind] = msgspec.field(default_factory=lambda: [Kind()])
    tenants: list[Share] = msgspec.field(default_factory=lambda: [Share(name="default")])
    models: list[Share] = msgspec.field(default_factory=list)  # models and adapters; none: the target's
    cancel: Cancel = Cancel()
    targets: Targets = Targets()
    repeat: int = 0  # greedy or seeded requests that are sent again at the end, to compare the answers
    meter: bool = False  # hold GET /usage of every tenant against the ledger; nobody else may use their keys meanwhile

    def __post_init__(self) -> None:
        require_above_zero(self, "duration_s", "requests", "timeout_s", "concurrency")
        require_not_negative(self, "seed", "warmup_s", "drain_s", "repeat")
        require(
            self._is_finite,
            "duration_s and requests are both null, and there is no trace; without one of them the load would never "
            "end",
        )
        require(
            self.duration_s is None or self.warmup_s < self.duration_s,
            f"warmup_s is {self.warmup_s:g}, not below duration_s: nothing would be measured",
        )
        _check_shares("kinds", self.kinds)
        _check_shares("tenants", self.tenants)
        if self.models:
            _check_shares("models", self.models)
        require(
            all(model.key_env is None for model in self.models), "models can't have a key_env; keys belong to tenants"
        )
        require(
            self.repeat == 0 or any(map(_is_repeated, self.kinds)),
            f"repeat is {self.repeat}, but no kind is greedy or seeded",
        )
        self._check_times()
        if self.trace is not None:
            self._check_trace(self.trace)

    @property
    def _is_finite(self) -> bool:
        return self.duration_s is not None or self.requests is not None or self.trace is not None

    def _check_times(self) -> None:
        """Check that times which are a share of the duration have one."""
        needed = {"step": ("at_s",), "ramp": ("length_s",), "spike": ("at_s", "length_s")}.get(
            self.arrivals.process, ()
        )
        missing = [key for key in needed if getattr(self.arrivals, key) is None]
        require(
            self.duration_s is not None or not missing,
            f"arrivals.{' and arrivals.'.join(missing)} must be set where duration_s is null: otherwise they are a "
            "part of the duration",
        )

    def _check_trace(self, trace: Trace) -> None:
        require(
            self.arrivals == Arrivals(),
            "arrivals and trace are both set; a trace brings its own times, so leave one of them out",
        )
        for place, kind in enumerate(self.kinds):
            key = f"kinds.{place}"
            require(kind.sessions is None, f"{key}.sessions and trace are both set; a trace brings its own requests")
            if trace.format == "mooncake":
                require(
                    kind.prompts.source != "corpus",
                    f"{key}.prompts.source is corpus; a mooncake trace says which prompts begin alike: use words or "
                    "tokens",
                )
                require(
                    kind.prompts.shared_prefix_tokens == 0,
                    f"{key}.prompts.shared_prefix_tokens is set; a mooncake trace brings its own shared prefixes",
                )


def load_scenario(path: Path | None, overrides: list[str]) -> Scenario:
    """The scenario of a YAML file (None: the defaults) with overrides like `arrivals.rate=4` applied.

    The name of an example stands for its file. Paths are relative to the file they stand in, those of overrides to the
    working directory; a scenario without a name has its file's. Raises ScenarioInvalid with file and key.
    """
    tree: dict[str, object] = {}
    if path is not None:
        path = find_scenario(path)
        tree = {"name": path.stem, **_read(path)}
    for setting in overrides:
        override(tree, setting)
    base = (path.parent if path is not None else Path()).absolute()
    try:
        marked = msgspec.convert(tree, Scenario, strict=False, dec_hook=lambda kind, value: _decode(kind, value, base))
    except msgspec.ValidationError as error:
        raise ScenarioInvalid(f"{path or 'The scenario'}: {_explain(error)}.") from None
    # msgspec writes no subclass of str, such as overrides.FromCommandLine: plain texts in their place
    return msgspec.convert(
        msgspec.to_builtins(marked, enc_hook=str), Scenario, dec_hook=lambda _, value: Path(str(value))
    )


def find_scenario(path: Path) -> Path:
    """The file itself, or the example of that name. Raises ScenarioInvalid."""
    if path.is_file():
        return path
    example = EXAMPLES / f"{path}.yaml"
    if len(path.parts) == 1 and example.is_file():
        return example
    names = sorted(example.stem for example in EXAMPLES.glob("*.yaml"))
    raise ScenarioInvalid(f"{path} is neither a file nor one of the examples {', '.join(names)}.")


def to_tree(scenario: Scenario) -> dict[str, object]:
    """Everything that is set, as JSON can hold it: paths as texts; what is infinite (no limit) is left out.
    `load_scenario` reads it back."""
    tree = msgspec.to_builtins(scenario, enc_hook=str)
    return {key: _finite(value) for key, value in tree.items()}


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items() if item != math.inf}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _read(path: Path) -> dict[str, object]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioInvalid(f"{path} can't be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScenarioInvalid(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if tree is not None and not isinstance(tree, dict):
        raise ScenarioInvalid(f"{path} is not a mapping of settings.")
    return tree or {}


def _decode(kind: type, value: object, base: Path) -> object:
    """Decode a Path, the one type of a scenario that msgspec does not know."""
    if kind is not Path:
        raise NotImplementedError(kind)
    return resolve_path(value, base)


def _explain(error: msgspec.ValidationError) -> str:
    """msgspec's message as a sentence that begins with the dotted key."""
    message, _, place = str(error).partition(" - at `$")
    key = re.sub(r"\[(\w+)\]", r".\1", place.rstrip("`")).strip(".")
    if isinstance(error.__cause__, ValueError):
        return f"{key}.{message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}" if key else message


def _check_shares(key: str, shares: Iterable[Kind | Share]) -> None:
    names = [share.name for share in shares]
    require(len(names) > 0, f"{key} is empty")
    require(len(set(names)) == len(names), f"{key} has two of the same name: {', '.join(names)}")
    require(sum(share.weight for share in shares) > 0, f"{key} have no weight above 0")


def _is_repeated(kind: Kind) -> bool:
    return kind.is_repeatable and kind.weight > 0
