"""The rows of a step that give way to a sequence that waits. Pure; no torch, no clock.

Rows of the class batch give way to those of all others. Among the tenants of a class, rows go by their weights: a
tenant gives a row to another one if by weight it still has as many as that one then; sequences without a weight take no
part. So two tenants never take rows from each other in turn, a tenant that has a row keeps one, and smaller differences
are left to the gateways, which count tokens.
"""

from collections.abc import Iterable, Iterator

from penstock.workers.engine.sequence import Sequence


class RowShares:
    """The rows of the running sequences, by tenant."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._batch: list[Sequence] = []
        self._rows: dict[tuple[bool, str], list[Sequence]] = {}
        for seq in running:
            if seq.weight:
                self._rows.setdefault((seq.is_batch, seq.tenant), []).append(seq)
            if seq.is_batch:
                self._batch.append(seq)

    def victims(self, waiting: Sequence) -> Iterator[Sequence]:
        """Running sequences that may give way to a waiting one, in the order in which they should: each may if those
        before it do. A tenant's newest comes first."""
        if not waiting.is_batch:
            newest = sorted(self._batch, key=_arrival_s)
            newest.reverse()  # of two that came at once, the one that runs since later
            yield from newest
        if not waiting.weight:
            return
        own = self._rows.get((waiting.is_batch, waiting.tenant), ())
        after = (len(own) + 1) / waiting.weight
        others = {
            tenant: sorted(rows, key=_arrival_s)
            for (is_batch, tenant), rows in self._rows.items()
            if is_batch == waiting.is_batch and tenant != waiting.tenant and _left_of(rows) >= after
        }
        while others:
            tenant = max(others, key=lambda tenant: _left_of(others[tenant]))
            if _left_of(others[tenant]) < after:
                return
            yield others[tenant].pop()


def _left_of(rows: list[Sequence]) -> float:
    """Rows by weight that a tenant has when it has given one."""
    return (len(rows) - 1) / rows[-1].weight


def _arrival_s(seq: Sequence) -> float:
    return seq.arrival_s
