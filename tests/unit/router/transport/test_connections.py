from hypothesis import given
from hypothesis import strategies as st

from penstock.router.transport.connections import GRACE_S, MAX_KNOWN, ConnectionLimits, Connections


class FakeConnection:
    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        assert self.is_open
        self.is_open = False


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(subject: Connections, address: str | None = None) -> FakeConnection:
    connection = FakeConnection()
    assert subject.add(connection, address)
    return connection


def test_the_oldest_without_a_key_gives_way_when_those_fill_half_of_the_places() -> None:
    subject = Connections(ConnectionLimits(max_connections=4), Clock())
    first, second, third = (opened(subject) for _ in range(3))

    assert [first.is_open, second.is_open, third.is_open] == [False, True, True]
    assert len(subject) == 2


def test_the_latest_peers_that_have_shown_a_key_are_known() -> None:
    subject = Connections(ConnectionLimits(), Clock())
    for number in range(MAX_KNOWN):
        subject.note_known(f"peer {number}")
    subject.note_known("peer 0")
    subject.note_known("another")

    assert subject.is_known("peer 0")
    assert subject.is_known("another")
    assert not subject.is_known("peer 1")
    assert not subject.is_known(None)


def test_a_connection_with_a_tenants_request_on_it_never_gives_way() -> None:
    subject = Connections(ConnectionLimits(max_connections=2), Clock())
    busy = [opened(subject) for _ in range(1)]
    subject.prove(busy[0], "a")
    busy.append(opened(subject))
    subject.prove(busy[1], "b")

    assert not subject.add(FakeConnection(), None)
    assert all(connection.is_open for connection in busy)


def test_of_those_that_rest_one_of_the_tenant_with_most_gives_way() -> None:
    subject = Connections(ConnectionLimits(max_connections=5), Clock())
    few, first, second, third = connections = [FakeConnection() for _ in range(4)]
    for connection, tenant in zip(connections, ["few", "many", "many", "many"], strict=True):
        subject.add(connection, None)
        subject.prove(connection, tenant)
        subject.rest(connection)
    subject.wake(first)
    opened(subject)
    opened(subject)

    assert [connection.is_open for connection in (few, first, second, third)] == [True, True, False, True]


def test_the_oldest_of_an_address_gives_way_but_only_after_the_grace() -> None:
    clock = Clock()
    subject = Connections(ConnectionLimits(max_unproven_per_address=2), clock)
    other = opened(subject, "other")
    connections = [opened(subject, "a") for _ in range(3)]
    assert all(connection.is_open for connection in connections)
    clock.now_s = GRACE_S
    opened(subject, "a")

    assert [connection.is_open for connection in (*connections, other)] == [False, True, True, True]


def test_connections_that_have_shown_a_key_do_not_count_for_their_address() -> None:
    clock = Clock()
    subject = Connections(ConnectionLimits(max_unproven_per_address=2), clock)
    proven = [opened(subject, "a") for _ in range(2)]
    for connection in proven:
        subject.prove(connection, "tenant")
    clock.now_s = GRACE_S
    others = [opened(subject, "a") for _ in range(2)]

    assert all(connection.is_open for connection in (*proven, *others))


def test_connections_of_no_known_address_are_not_limited_as_one_client() -> None:
    clock = Clock()
    subject = Connections(ConnectionLimits(max_unproven_per_address=2), clock)
    connections = [opened(subject) for _ in range(50)]
    clock.now_s = GRACE_S
    opened(subject)

    assert all(connection.is_open for connection in connections)


@given(st.lists(st.tuples(st.sampled_from(["add", "prove", "rest", "wake", "remove"]), st.integers(0, 7))))
def test_whatever_happens_the_register_is_bounded_and_forgets_what_is_gone(steps: list[tuple[str, int]]) -> None:
    subject = Connections(ConnectionLimits(max_connections=6, max_unproven_per_address=2), Clock())
    held: list[FakeConnection] = []
    for step, number in steps:
        if step == "add":
            connection = FakeConnection()
            if subject.add(connection, str(number % 3)):
                held.append(connection)
        elif held:
            connection = held[number % len(held)]
            if step == "prove":
                subject.prove(connection, str(number % 2))
            elif step == "rest":
                subject.rest(connection)
            elif step == "wake":
                subject.wake(connection)
            else:
                subject.remove(connection)
                held.remove(connection)
        held = [connection for connection in held if connection.is_open]

        assert len(subject) == len(held) <= 6
    for connection in held:
        subject.remove(connection)
    assert len(subject) == subject.num_unproven == 0
