"""The state of a fake server between requests: which are in service, how many were admitted, which prefixes are cached.
Pure: times are parameters."""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from penstock_loadtest.fake.behaviour import Shedding

T = TypeVar("T")


class Slots(Generic[T]):
    """Slots of service: `count` items are served at once, the others in the order they came; None: all at once."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._waiting: deque[T] = deque()
        self.serving = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, item: T) -> bool:
        """True when the item has a slot; otherwise `leave` returns it when its turn has come."""
        if self._count is not None and self.serving >= self._count:
            self._waiting.append(item)
            return False
        self.serving += 1
        return True

    def leave(self) -> T | None:
        """Give a slot back; returns the item that has it now, None where none waits."""
        if self._waiting:
            return self._waiting.popleft()
        self.serving -= 1
        return None

    def give_up(self, item: T) -> None:
        """Remove an item that waits."""
        self._waiting.remove(item)


class LoadShedder:
    """Declines requests by rate and by concurrency."""

    def __init__(self, rules: Shedding | None) -> None:
        self._rules = rules
        self._tokens = 0.0 if rules is None else float(rules.burst)
        self._at_s: float | None = None

    def retry_after_s(self, now_s: float, concurrency: int) -> int | None:
        """None lets the request in; a number declines it and is its Retry-After."""
        rules = self._rules
        if rules is None:
            return None
        if rules.concurrency is not None and concurrency >= rules.concurrency:
            return 1 if rules.retry_after_s is None else rules.retry_after_s
        if rules.rate is None:
            return None
        self._tokens = min(
            rules.burst, self._tokens + rules.rate * (now_s - (now_s if self._at_s is None else self._at_s))
        )
        self._at_s = now_s
        if self._tokens >= 1:
            self._tokens -= 1
            return None
        return math.ceil((1 - self._tokens) / rules.rate) if rules.retry_after_s is None else rules.retry_after_s


class PrefixCache:
    """Leading blocks of prompts that earlier prompts had too. Only whole blocks count, and never the whole prompt: its
    last token is always computed."""

    def __init__(self, block_tokens: int, capacity: int) -> None:
        self._block_tokens, self._capacity = block_tokens, capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def cached_tokens(self, namespace: str, prompt: Sequence[str | int]) -> int:
        """Cached tokens of a prompt, which is remembered from now on."""
        key, cached, hits = namespace.encode(), 0, True
        for begin in range(0, len(prompt) - self._block_tokens + 1, self._block_tokens):
            key = blake2b(key + repr(prompt[begin : begin + self._block_tokens]).encode(), digest_size=16).digest()
            hits = hits and key in self._blocks
            cached += self._block_tokens if hits else 0
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return min(cached, max(0, len(prompt) - 1) // self._block_tokens * self._block_tokens)
