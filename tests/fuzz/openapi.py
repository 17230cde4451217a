"""Requests made from the gateway's own /openapi.json by schemathesis, sent to a running platform:
`python -m tests.fuzz openapi --cases N`.

A third of them keep to the document, a third break it somewhere, and a third keep to what is also supported, so that
most of these are served. Whatever is asked, the answer is one that the document has for it: no error of the server's
but a 503 that is documented, within CASE_S, from a gateway that neither dies nor grows by more than GROWTH_BYTES. A
fault is printed with its smallest request, as a curl line, and with the seed that repeats it. The exit status is 1 if
anything was found.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import psutil
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.support.platform_process import PlatformProcess, running_platform, timed_platform
from penstock.wire.anthropic import MessageEvent
from penstock.wire.openai import ChatCompletionChunk, TextCompletion
from penstock.wire.responses import ResponseEvent

MODEL = "sim"
CONFIG = timed_platform(
    "max_num_seqs: 64, max_batched_tokens: 2048, timed: {base_s: 0.001, num_blocks: 8192, max_model_len: 256}"
)
Mode = Literal["valid", "invalid", "supported"]
"""Kinds of requests: what the document allows, what it does not, and of what it allows that which is supported too."""
MODES: tuple[Mode, ...] = get_args(Mode)
CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)
STREAM = "text/event-stream"
CHUNKS: dict[str, type] = {
    "POST /v1/chat/completions": ChatCompletionChunk,
    "POST /v1/completions": TextCompletion,
    "POST /v1/messages": MessageEvent,
    "POST /v1/responses": ResponseEvent,
}
LAST_EVENTS = {"POST /v1/messages": ("message_stop",), "POST /v1/responses": ("completed", "incomplete")}
"""Ends of the names of the last events, where it is not [DONE]."""
CASE_S = 30.0
"""Time within which the answer to one request must be there, seconds."""
GROWTH_BYTES = 256 * 2**20
"""Memory that the gateway may gain beyond what it had when it was warm."""
LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
WARM_CASES = 200
"""Requests after which the gateway's memory is the one that it may grow from."""


class ApiFault(NamedTuple):
    """Something that was found."""

    operation: str
    mode: Mode
    seed: int
    what: str
    """The error, with the request as a curl line."""


class NoAnswer(BaseException):
    """A request that got no answer in time; not made smaller, which would take that time again and again."""


class Tally:
    """What the requests were answered with, and the gateway's memory beside it."""

    def __init__(self, gateway: int) -> None:
        self._gateway = psutil.Process(gateway)
        self.statuses: Counter[int] = Counter()
        self.slowest_s = 0.0
        self.start_bytes = self.peak_bytes = self.memory()

    def memory(self) -> int:
        return int(self._gateway.memory_info().rss)

    @property
    def num_cases(self) -> int:
        return self.statuses.total()

    def add(self, status: int, seconds: float) -> None:
        """Count an answer. Raises AssertionError if the gateway has grown too much."""
        self.statuses[status] += 1
        self.slowest_s = max(self.slowest_s, seconds)
        now = self.memory()
        if self.num_cases == WARM_CASES:
            self.start_bytes = now
        self.peak_bytes = max(self.peak_bytes, now)
        assert now - self.start_bytes <= GROWTH_BYTES, f"the gateway has grown by {now - self.start_bytes} bytes"


class ApiFuzz:
    """The operations of one running platform's document."""

    def __init__(self, platform: PlatformProcess) -> None:
        (gateway,) = platform.gateways
        self.tally = Tally(gateway)
        self._url, self._headers = platform.url, {"Authorization": f"Bearer {platform.key}"}
        self._session = requests.Session()
        self._session.trust_env = False
        document = self._session.get(f"{platform.url}/openapi.json", timeout=CASE_S).json()
        self._documented = {
            f"{method.upper()} {path}": set(operation["responses"])
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if method != "parameters"
        }
        self.operations = {
            "valid": operations(document, platform.url),
            "invalid": operations(document, platform.url),
            "supported": operations(narrow(document), platform.url),
        }
        assert set(self.operations["valid"]) == set(self._documented)

    def try_seed(self, label: str, mode: Mode, number: int, max_examples: int) -> ApiFault | None:
        """Send the requests of one seed to an operation, `METHOD path`."""
        generation = GenerationMode.NEGATIVE if mode == "invalid" else GenerationMode.POSITIVE
        cases = self.operations[mode][label].as_strategy(generation_mode=generation)

        @seed(number)
        @settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases, names_model=st.booleans())
        def one(case: Any, names_model: bool) -> None:
            if names_model and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL  # else nearly all are of a model that is not there
            if mode == "supported":
                case.body = whole(case.body)
            self._send(label, case)

        try:
            one()
        except Unsatisfiable:
            return None  # an operation without a body or a parameter can't be asked wrongly
        except (Exception, NoAnswer) as error:  # noqa: BLE001 (whatever is raised is what is looked for)
            return ApiFault(label, mode, number, f"{type(error).__name__}: {error}"[:4000])
        return None

    def _send(self, label: str, case: Any) -> None:
        sent = case.as_transport_kwargs(base_url=self._url, headers=self._headers)
        begun_s = time.monotonic()
        try:
            response = self._session.request(**sent, timeout=CASE_S)
        except requests.RequestException as error:
            raise NoAnswer(f"{error}\n{case.as_curl_command(self._headers)}") from error
        self.tally.add(response.status_code, time.monotonic() - begun_s)
        fault = find_fault(label, response, self._documented[label])
        assert fault is None, f"{fault}\n{case.as_curl_command(self._headers)}"
        is_stream = response.headers.get("content-type", "").startswith(STREAM)
        case.validate_response(response, checks=list(CHECKS[:2] if is_stream else CHECKS))

    def close(self) -> None:
        self._session.close()


def find_fault(label: str, response: requests.Response, documented: Collection[str]) -> str | None:
    """What is wrong with an answer beside its form: an error of the server's, or a stream that does not end well."""
    if response.elapsed.total_seconds() > CASE_S:
        return f"it took {response.elapsed.total_seconds():.0f} s"
    if response.status_code >= 500 and (response.status_code != 503 or "503" not in documented):
        return f"{response.status_code} {response.text[:500]}"
    if not response.headers.get("content-type", "").startswith(STREAM):
        return None
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    if label in LAST_EVENTS:
        has_ended = bool(names) and names[-1].endswith(LAST_EVENTS[label])
    else:
        has_ended = events[-1:] == ["[DONE]"]
    if not has_ended:
        return f"the stream ends with {events[-1:]}"
    for event in events if label in LAST_EVENTS else events[:-1]:
        try:
            msgspec.json.decode(event, type=CHUNKS[label])
        except msgspec.MsgspecError as error:
            return f"{error}: {event[:500]}"
    return None


def operations(document: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Operations of a document, as schemathesis has them, by `METHOD path`."""
    schema = schemathesis.openapi.from_dict(dict(document))
    schema.config.update(base_url=url)
    schema.config.output.sanitization.update(enabled=False)  # it takes max_tokens for a secret
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def narrow(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document less what is refused for other reasons than its schema: other models, fields that are not supported
    or unknown, messages that are no conversation, answers longer than the model's context."""
    found = deepcopy(dict(document))
    schemas = found["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        schema = schemas[name]
        fields = {key: value for key, value in schema["properties"].items() if not value.get("deprecated")}
        fields |= {"model": {"enum": [MODEL]}, "n": {"type": "integer", "minimum": 1, "maximum": 4}}
        fields |= {each: {"type": "integer", "minimum": 1, "maximum": 100} for each in LENGTHS & fields.keys()}
        fields["logit_bias"] = {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,4}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
        schema |= {"properties": fields, "additionalProperties": False}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
        "additionalProperties": False,
    }
    schemas["ChatRequest"]["properties"]["messages"] = {"type": "array", "minItems": 1, "items": message}
    return found


def whole(body: Any) -> Any:
    """A body with whole numbers for those that end in .0: JSON Schema calls both integers, the API takes one."""
    if isinstance(body, dict):
        return {key: whole(value) for key, value in body.items()}
    if isinstance(body, list):
        return [whole(value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


def num_examples(label: str) -> int:
    """Requests of one seed: more where they can differ more, by a body or by a part of the path."""
    if label.startswith("POST "):
        return 40
    return 10 if "{" in label else 2


def fuzz(api: ApiFuzz, num_cases: int, rng: random.Random, only: Sequence[str] = ()) -> dict[str, ApiFault]:
    """Faults by operation, the first one of each: all operations by turns, until so many requests were answered or
    every operation has failed."""
    found: dict[str, ApiFault] = {}
    labels = [label for label in api.operations["valid"] if not only or label in only]
    open_labels = list(labels)
    while open_labels and api.tally.num_cases < num_cases:
        for label in open_labels:
            for mode in MODES:
                left = num_cases - api.tally.num_cases
                count = min(left, num_examples(label))
                fault = api.try_seed(label, mode, rng.getrandbits(48), count) if count > 0 else None
                if fault is not None and label not in found:
                    print_fault(fault)
                    found[label] = fault
        open_labels = [label for label in labels if label not in found]
    return found


def print_fault(fault: ApiFault) -> None:
    sys.stdout.write(f"{fault.operation}, {fault.mode}, seed {fault.seed}:\n  {fault.what}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz openapi", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="requests in all")
    parser.add_argument("--only", nargs="+", default=[], metavar="OPERATION", help="such as 'POST /v1/completions'")
    parser.add_argument("--seed", type=int, help="repeat this seed of the operations in --only, in every mode")
    args = parser.parse_args(arguments)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder, running_platform(Path(folder), CONFIG) as up:
        api = ApiFuzz(up)
        if args.seed is None:
            found = fuzz(api, args.cases, random.Random(), args.only)
        else:
            asked = [(label, mode) for label in args.only for mode in MODES]
            faults = [api.try_seed(label, mode, args.seed, num_examples(label)) for label, mode in asked]
            found = {fault.operation: fault for fault in faults if fault is not None}
            for fault in found.values():
                print_fault(fault)
        end = api.tally.memory()
        tally = api.tally
        api.close()
    print_tally(tally, end, time.monotonic() - begun_s, len(found))
    return 1 if found else 0


def print_tally(tally: Tally, end_bytes: int, seconds: float, num_faults: int) -> None:
    grown = [(each - tally.start_bytes) / 2**20 for each in (tally.peak_bytes, end_bytes)]
    sys.stdout.write(
        f"{tally.num_cases} requests in {seconds:.0f} s: {dict(sorted(tally.statuses.items()))}; "
        f"slowest {tally.slowest_s:.2f} s; the gateway's memory {grown[0]:+.0f} MiB at its most, {grown[1]:+.0f} at "
        f"the end; {num_faults} operations failed\n"
    )
