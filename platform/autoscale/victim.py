"""The replicas that go when there are too many: those whose cache is worth least. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.autoscale.observation import ReplicaSnapshot


def choose_victims(
    running: Sequence[str], replicas: Iterable[ReplicaSnapshot], hits_before: Mapping[str, int], count: int
) -> tuple[str, ...]:
    """`count` of the ids in `running`, which has the oldest first.

    Worth is, in this order: prompt tokens that a cache has saved since `hits_before` was noted, blocks it holds,
    sequences that would have to be finished. One that no gateway knows is worth nothing. Of equals the newest goes.
    """
    by_id = {replica.replica_id: replica for replica in replicas}

    def worth(place: int) -> tuple[int, int, int, int]:
        replica = by_id.get(running[place])
        if replica is None:
            return -1, 0, 0, -place
        num_hits = max(0, replica.hit_tokens - hits_before.get(replica.replica_id, 0))
        return num_hits, replica.cached_blocks, replica.load.num_running + replica.load.num_waiting, -place

    return tuple(running[place] for place in sorted(range(len(running)), key=worth)[:count])
