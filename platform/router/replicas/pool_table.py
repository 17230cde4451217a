"""The replicas of a pool in a table for the policy, brought up to date when somebody reads it: clients say that they
changed, and only what changed since is written again.

Not the choice (`penstock.router.routing.search`). Invariant: what `read` returns holds each client's numbers as they
are at that moment.
"""

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from penstock.prefix.holders import HolderRows
from penstock.router.replicas.replica_client import ADAPTER_LOAD_S, ReplicaClient
from penstock.router.routing.chains import ChainKind
from penstock.router.routing.replica_table import PoolQuery, ReplicaTable

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class PoolTable:
    """A pool's replicas, in the clients' order. The clients tell their changes to this table, and no more to one before
    it."""

    def __init__(self, pool: str, clients: Sequence[ReplicaClient]) -> None:
        self.clients = clients
        self.kinds = frozenset(client.chain_kind for client in clients)
        """Kinds of chains that the replicas need."""
        self._changed = set(clients)
        for client in clients:
            client.tell_changes_to(self._changed)
        self._table = ReplicaTable(pool, [client.member.replica_id for client in clients])
        self._rows = {client.member.replica_id: row for row, client in enumerate(clients)}
        self._holders = HolderRows(list(self._rows))
        self._resident: list[tuple[str, ...]] = [()] * len(clients)
        self._rows_by_adapter: dict[str, set[int]] = {}
        """Replicas that have an adapter in a slot."""
        self._rows_with_waits: set[int] = set()
        """Replicas where sequences wait for adapters."""
        self._able: dict[Set[str], Bools] = {}
        self._of_kind: dict[ChainKind, Bools] = {}

    def read(self) -> ReplicaTable:
        """The table as of now."""
        if self._changed:
            for client in self._changed:
                self._write(self._rows[client.member.replica_id], client)
            self._changed.clear()
        return self._table

    def query(
        self,
        held: Mapping[ChainKind, Mapping[str, int]],
        num_tokens: int,
        adapter: str | None,
        tenant: str,
        allowed: Bools | None,
    ) -> PoolQuery:
        """What a request of `num_tokens` finds there. held: leading blocks of it that each replica holds, by the kind
        of chain; none: nothing in a cache is of use. adapter: digest of the one that it needs."""
        table = self.read()
        cached_tokens = np.zeros(len(self.clients))
        is_cached = False
        for kind, blocks in held.items():
            if blocks:
                is_cached = True
                tokens = self._spread(blocks, kind.block_size, num_tokens)
                cached_tokens = tokens if len(self.kinds) == 1 else np.where(self._is_of(kind), tokens, cached_tokens)
        if adapter is None:
            return PoolQuery(table, cached_tokens, is_cached, allowed)
        is_lacking = np.ones(len(self.clients), dtype=bool)
        is_lacking[list(self._rows_by_adapter.get(adapter, ()))] = False
        lacks_slot = np.zeros(len(self.clients), dtype=bool)
        for row in self._rows_with_waits:
            lacks_slot[row] = is_lacking[row] and not self.clients[row].has_adapter_room(tenant)
        return PoolQuery(table, cached_tokens, is_cached, allowed, is_lacking * ADAPTER_LOAD_S, lacks_slot)

    def find_allowed(self, abilities: Set[str], refused_by: Set[str]) -> Bools | None:
        """Find the replicas that a request may go to: those with these abilities, less those that refused it. Returns
        None where that is each one."""
        if not abilities and not refused_by:
            return None
        able = self._able.get(abilities)
        if able is None:
            able = self._able[abilities] = np.array([abilities <= each.member.abilities for each in self.clients])
        if not refused_by:
            return able
        allowed = able.copy()
        allowed[[self._rows[replica_id] for replica_id in refused_by if replica_id in self._rows]] = False
        return allowed

    def has_ready(self, is_allowed: Bools | None) -> bool:
        """Whether a replica is ready; is_allowed: among which, None: all."""
        is_ready = self.read().is_ready > 0
        return bool((is_ready if is_allowed is None else is_ready & is_allowed).any())

    def has_draining(self, is_allowed: Bools | None) -> bool:
        """Whether a ready replica drains; is_allowed: among which, None: all."""
        is_draining = self.read().is_draining > 0
        return bool((is_draining if is_allowed is None else is_draining & is_allowed).any())

    def _spread(self, blocks: Mapping[str, int], size: int, num_tokens: int) -> Floats:
        """Array [replicas] of the leading tokens that each holds, of a request of `num_tokens`, in blocks of `size`."""
        # the last token is always computed: its logits choose the next one
        spread: Floats = np.minimum(self._holders.read(blocks), (num_tokens - 1) // size)
        spread *= size
        return spread

    def _is_of(self, kind: ChainKind) -> Bools:
        found = self._of_kind.get(kind)
        if found is None:
            found = self._of_kind[kind] = np.array([client.chain_kind == kind for client in self.clients])
        return found

    def _write(self, row: int, client: ReplicaClient) -> None:
        if not client.is_ready:
            self._table.close(row)
            self._note_adapters(row, ())
            self._rows_with_waits.discard(row)
            return
        view = client.view(0)
        self._table.write(row, view)
        self._note_adapters(row, view.load.resident_adapters)
        if client.has_adapter_waits:
            self._rows_with_waits.add(row)
        else:
            self._rows_with_waits.discard(row)

    def _note_adapters(self, row: int, resident: tuple[str, ...]) -> None:
        before = self._resident[row]
        if resident == before:
            return
        self._resident[row] = resident
        for adapter in before:
            self._rows_by_adapter[adapter].discard(row)
            if not self._rows_by_adapter[adapter]:
                del self._rows_by_adapter[adapter]
        for adapter in resident:
            self._rows_by_adapter.setdefault(adapter, set()).add(row)
