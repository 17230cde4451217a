"""Hostile constraints, tried: `python -m tests.unit.hostile_constraints` takes them one after the other and prints a
line of JSON for each. A process of its own, since the worst that they could do is to end it.
"""

import json
import random
import sys
import time
from typing import Any, NamedTuple

from bench.support.hostile_constraints import HOSTILE
from penstock.text.grammar import find_error
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint
from penstock.workers.compute.grammar.compiler import GrammarCompiler
from penstock.workers.compute.grammar.matcher import GrammarFault
from tests.yardstick import measure_yardstick_s

NUM_TOKENS = 150
"""Random tokens of an answer, each of which the grammar allows."""
VOCAB_SIZE = 2048


class Outcome(NamedTuple):
    """What became of one constraint. Times are CPU seconds of the whole process."""

    name: str
    error: str | None
    """Why it was refused."""
    check_s: float
    fault: str | None = None
    """Why the answer ended with an error."""
    compile_s: float = 0.0
    """CPU seconds until the first mask was there."""
    slowest_s: float = 0.0
    """The slowest of the other masks, its token included."""
    rss_bytes: int = 0
    """Memory that the process has gained."""
    yardstick_s: float = 0.0
    """CPU seconds that the yardstick took just after."""


class _Texts:
    """A vocabulary of all bytes and of made-up words, as large as the bytes' pairs of a small model's."""

    def __init__(self) -> None:
        draw = random.Random(0)
        words = {bytes(draw.choices(b'abxyz01 {}[]":,\n', k=draw.randint(2, 6))) for _ in range(4 * VOCAB_SIZE)}
        self.token_bytes = [*[bytes([byte]) for byte in range(256)], *sorted(words)[: VOCAB_SIZE - 256]]
        self.special_ids = frozenset[int]()
        self.eos_token_ids = frozenset[int]()


def try_one(compiler: GrammarCompiler, name: str) -> Outcome:
    constraint = HOSTILE[name]
    rss = _rss_bytes()
    begun_s = time.process_time()
    error = find_error(constraint)
    check_s = time.process_time() - begun_s
    if error is not None:
        return Outcome(name, error, check_s, rss_bytes=_rss_bytes() - rss)
    begun_s = time.process_time()
    try:
        matcher = compiler.compile(constraint, "t", [])
    except InvalidRequest as refusal:
        return Outcome(name, None, check_s, refusal.message, time.process_time() - begun_s)
    compile_s = time.process_time() - begun_s
    slowest_s, fault = 0.0, None
    draw, output = random.Random(2), list[int]()
    try:
        while len(output) < NUM_TOKENS and not matcher.is_complete:
            begun_s = time.process_time()
            allowed, _ = matcher.allowed()
            places = allowed.row().nonzero()[0].tolist()
            if not places:
                break
            output.append(draw.choice(places))
            matcher.go_to(output)
            slowest_s = max(slowest_s, time.process_time() - begun_s)
    except GrammarFault as error_of_row:
        fault = str(error_of_row)
    return Outcome(name, None, check_s, fault, compile_s, slowest_s, _rss_bytes() - rss)


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    compiler = GrammarCompiler(_Texts, VOCAB_SIZE)
    compiler.compile(Constraint("regex", "a"), "t", [])
    for name in HOSTILE:
        _say({"name": name})
        _say(try_one(compiler, name)._replace(yardstick_s=measure_yardstick_s())._asdict())


if __name__ == "__main__":
    sys.exit(main())
