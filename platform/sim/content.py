"""What a simulated prompt consists of, instead of its text: segments with lengths, and the block keys that follow.

Equal leading segments are equal leading tokens, as in the load tester's texts: so two requests have a block's key in
common exactly when a replica could use the block of one for the other. The last segments of most prompts are one
request's alone; their blocks need no keys.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock_loadtest.planned import Planned, Prompt
from penstock_loadtest.scenario import Prompts
from penstock_loadtest.workload.kinds import OWN, hash_name
from penstock_loadtest.workload.trace_row import UNSHARED


class Segment(NamedTuple):
    """Tokens that stand together. Equal numbers are equal tokens, as far as both go."""

    number: int
    num_tokens: int
    is_private: bool = False
    """Whether no other request has them."""


class SegmentMaker:
    """Stands for the load tester's maker of texts: a text is the list of its segments, as "number:tokens". Numbers of
    private ones are negative. Raises ConfigError for real text, whose tokens only a tokenizer knows."""

    def __init__(self, prompts: Prompts, seed: int) -> None:
        if prompts.source == "corpus":
            raise ConfigError("kinds.prompts.source is corpus; the simulator needs lengths: use words or tokens")
        self._seed = seed

    def tokens(self, count: int, *key: int) -> list[int]:
        return [self._number(key), count]

    def words(self, count: int, *key: int) -> str:
        return f"{self._number(key)}:{count}"

    def block_tokens(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> list[int]:
        made: list[int] = []
        for place, hash_id in enumerate(hash_ids):
            number = -1 - hash_id if hash_id >= UNSHARED else hash_id
            made += number, min(block_tokens, count - place * block_tokens)
        return made

    def block_words(self, hash_ids: Sequence[int], block_tokens: int, count: int) -> str:
        made = self.block_tokens(hash_ids, block_tokens, count)
        return " ".join([f"{made[place]}:{made[place + 1]}" for place in range(0, len(made), 2)])

    def corpus(self, index: int, count: int) -> list[str]:  # noqa: ARG002 (as of TextMaker)
        raise AssertionError("a corpus was refused")

    def _number(self, key: tuple[int, ...]) -> int:
        number = hash_name(f"{self._seed} {key}")
        return -1 - number if key[1] == OWN else number


def read_segments(planned: Planned) -> list[Segment]:
    """The segments of a planned request's own turn. What a session has is in its later turns too."""
    is_single = planned.session is None
    segments = [] if planned.system is None else _parse(planned.system, is_single=is_single)
    return segments + _parse(planned.prompt, is_single=is_single)


def _parse(text: Prompt, *, is_single: bool) -> list[Segment]:
    numbers = text if isinstance(text, list) else [int(number) for part in text.split() for number in part.split(":")]
    return [
        Segment(numbers[place], numbers[place + 1], is_single and numbers[place] < 0)
        for place in range(0, len(numbers), 2)
    ]


def make_keys(segments: Iterable[Segment], block_size: int) -> list[bytes]:
    """Keys of the leading full blocks that other requests may have too: 16 bytes each."""
    keys: list[bytes] = []
    chain, start = b"", 0
    for number, num_tokens, is_private in segments:
        if is_private:
            break
        digest = blake2b(chain, digest_size=12)
        digest.update(number.to_bytes(16, "big", signed=True) + start.to_bytes(8, "big"))
        chain = digest.digest()
        end = start + num_tokens
        keys += [chain + index.to_bytes(4, "big") for index in range(start // block_size, end // block_size)]
        start = end
    return keys
