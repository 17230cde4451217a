"""The rows of a step that give way to a sequence that waits. Pure; no torch, no clock.

Rows go by the weights of their tenants, which are a tenth for the class batch: a tenant gives a row to another one if
by weight it has more than that one will have then. So two tenants never take rows from each other in turn, and smaller
differences are left to the gateways, which count tokens. Sequences without a weight take no part, but that their batch
rows give way to all others.
"""

from collections.abc import Iterable, Iterator

from penstock.workers.engine.sequence import Sequence


class RowShares:
    """The rows of the running sequences, by tenant."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._rows: dict[tuple[bool, str], list[Sequence]] = {}
        self._weightless_batch: list[Sequence] = []
        for seq in running:
            if seq.weight:
                self._rows.setdefault(_key(seq), []).append(seq)
            elif seq.is_batch:
                self._weightless_batch.append(seq)

    def victims(self, waiting: Sequence) -> Iterator[Sequence]:
        """Running sequences that may give way to a waiting one, in the order in which they should: each may if those
        before it do. The tenant with most by weight gives first, and of its rows the newest; of two that came at once,
        the one that runs since later."""
        if not waiting.is_batch:
            yield from reversed(self._weightless_batch)
        if not waiting.weight:
            return
        own = self._rows.get(_key(waiting), ())
        after = (len(own) + 1) / waiting.weight
        others = {
            key: sorted(rows, key=lambda seq: seq.arrival_s)
            for key, rows in self._rows.items()
            if key != _key(waiting) and _by_weight(rows) > after
        }
        while others:
            key = max(others, key=lambda key: (_by_weight(others[key]), others[key][-1].arrival_s))
            yield others[key].pop()
            if not others[key] or _by_weight(others[key]) <= after:
                del others[key]


def _key(seq: Sequence) -> tuple[bool, str]:
    """Rows of a tenant are one share as long as its class stays."""
    return seq.is_batch, seq.tenant


def _by_weight(rows: list[Sequence]) -> float:
    return len(rows) / rows[-1].weight
