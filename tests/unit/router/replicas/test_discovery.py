from types import SimpleNamespace
from typing import Any

from penstock.router.replicas.discovery import ReplicaDiscovery, RunningReplica
from penstock.wire.discovery import ReplicaMetadata, StartTimes, to_metadata


def running(replica_id: str, pool: str = "a", **metadata: Any) -> SimpleNamespace:
    """A replica as Serve's broadcast describes it."""
    published = metadata or to_metadata(
        ReplicaMetadata(f"host-{replica_id}:1", f"epoch-{replica_id}", pool, "digest", 100, 16)
    )
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica_id), replica_metadata=published)


def member(replica_id: str, pool: str = "a") -> RunningReplica:
    return RunningReplica(replica_id, pool, f"host-{replica_id}:1", f"epoch-{replica_id}", "digest", 100, 16)


def test_every_broadcast_gives_the_members_of_all_pools() -> None:
    changes: list[list[RunningReplica]] = []
    members = ReplicaDiscovery("r", {"a": "pool-a", "b": "pool-b"}, changes.append)

    members.on_targets("a", SimpleNamespace(running_replicas=[running("1"), running("2")]))
    members.on_targets("b", SimpleNamespace(running_replicas=[running("3", "b")]))
    members.on_targets("a", SimpleNamespace(running_replicas=[running("2")]))

    assert changes == [
        [member("1"), member("2")],
        [member("1"), member("2"), member("3", "b")],
        [member("2"), member("3", "b")],
    ]


def test_a_replica_tells_how_long_its_start_took() -> None:
    changes: list[list[RunningReplica]] = []
    times = StartTimes(12.0, 3.5)
    published = to_metadata(ReplicaMetadata("host-1:1", "epoch-1", "a", "digest", 100, 16, start=times))
    info = SimpleNamespace(replica_id=SimpleNamespace(unique_id="1"), replica_metadata=published)

    ReplicaDiscovery("r", {"a": "pool-a"}, changes.append).on_targets("a", SimpleNamespace(running_replicas=[info]))

    assert [each.start for each in changes[-1]] == [times]


def test_a_replica_tells_that_its_prefixes_are_private_and_one_of_an_earlier_version_does_not() -> None:
    changes: list[list[RunningReplica]] = []
    members = ReplicaDiscovery("r", {"a": "pool-a"}, changes.append)
    published = to_metadata(ReplicaMetadata("host-1:1", "epoch-1", "a", "digest", 100, 16, has_private_prefixes=True))
    earlier = {name: value for name, value in published.items() if name != "has_private_prefixes"}

    infos = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id="1"), replica_metadata=m) for m in (published, earlier)
    ]
    members.on_targets("a", SimpleNamespace(running_replicas=infos))

    assert changes == [[member("1")._replace(has_private_prefixes=True), member("1")]]


def test_replicas_of_another_version_or_pool_are_left_out() -> None:
    changes: list[list[RunningReplica]] = []
    members = ReplicaDiscovery("r", {"a": "pool-a"}, changes.append)

    members.on_targets(
        "a", SimpleNamespace(running_replicas=[running("1", version="older"), running("2", "b"), running("3")])
    )

    assert changes == [[member("3")]]
