from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.serving.residency import IDLE_S, MIN_SERVICE_S, SERVICE_PER_LOAD, SERVICE_S, Left, Slots


def filled(num_slots: int, *digests: str) -> Slots[str]:
    slots: Slots[str] = Slots(num_slots)
    for digest in digests:
        assert slots.reserve()
        slots.put(digest, digest.upper())
    return slots


def test_the_least_lately_used_adapter_makes_room() -> None:
    slots = filled(2, "a", "b")
    assert slots.pin("a") == "A"
    slots.unpin("a")

    assert slots.reserve()

    assert slots.digests == ("a",)
    slots.check()


def test_the_adapter_with_the_least_predicted_use_makes_room_also_where_another_was_used_less_lately() -> None:
    slots = filled(2, "a", "b")
    for digest in "aaab":
        slots.pin(digest)
        slots.unpin(digest)

    assert slots.reserve()

    assert slots.digests == ("a",)


def test_one_that_comes_back_is_known_by_its_uses_before() -> None:
    slots = filled(2, "a", "b")
    for digest in "aaa":
        slots.pin(digest)
        slots.unpin(digest)
    slots.pin("b")
    slots.pin("b")
    assert slots.reserve(), "a makes room, since b is in use"
    slots.put("a", "A")
    slots.unpin("b")
    slots.unpin("b")

    assert slots.reserve()

    assert slots.digests == ("a",)


def test_a_pinned_adapter_stays_until_its_last_sequence_has_ended() -> None:
    slots = filled(1, "a")
    slots.pin("a")
    slots.pin("a")
    slots.unpin("a")

    assert not slots.reserve()
    slots.unpin("a")
    assert slots.reserve()


def test_a_reserved_slot_counts() -> None:
    slots: Slots[str] = Slots(1)
    assert slots.reserve()

    assert not slots.reserve()
    slots.unreserve()
    assert slots.reserve()


def test_a_dropped_adapter_is_found_no_more_and_leaves_with_its_last_pin() -> None:
    slots = filled(2, "a", "b")
    slots.pin("a")

    slots.drop("a")
    slots.drop("b")
    slots.drop("never there")

    assert slots.digests == ()
    assert "a" in slots
    slots.unpin("a")
    assert "a" not in slots
    slots.check()


def test_a_dropped_adapter_that_is_wanted_again_stays() -> None:
    slots = filled(1, "a")
    slots.pin("a")
    slots.drop("a")

    assert slots.pin("a") == "A"

    slots.unpin("a")
    slots.unpin("a")
    assert slots.digests == ("a",)


def test_a_closed_adapter_takes_no_newcomers_and_leaves_with_its_last_pin() -> None:
    slots = filled(2, "a", "b")
    for digest in "ab":
        slots.pin(digest)

    slots.drain_one()
    slots.drain_one()

    assert slots.digests == ("b",)
    assert slots.pin("a") is None
    slots.unpin("a")
    assert "a" not in slots
    assert slots.reserve()


def test_a_closed_adapter_can_be_opened_again() -> None:
    slots = filled(1, "a")
    slots.pin("a")
    slots.drain_one()

    slots.stop_draining("a")

    assert slots.pin("a") == "A"


def used(num_slots: int, **tenants: str) -> Slots[str]:
    """Slots with an adapter for each letter, loaded at 0 s, that a sequence of its tenant has just used."""
    slots: Slots[str] = Slots(num_slots)
    for tenant, digests in tenants.items():
        for digest in digests:
            assert slots.reserve(tenant)
            slots.put(digest, digest, tenant)
            slots.pin(digest, tenant)
            slots.unpin(digest)
    return slots


def test_a_tenant_with_many_adapters_gets_no_slot_of_one_that_has_as_many_or_fewer() -> None:
    slots = used(3, few="a", many="bc")

    assert not slots.reserve("many", SERVICE_S / 2)
    assert slots.reserve("many", SERVICE_S)
    assert slots.digests == ("a", "c"), "its own that was least lately used"
    slots.check()


def test_a_tenant_gets_a_slot_at_once_of_one_that_has_two_more() -> None:
    slots = used(3, few="a", many="bc")
    assert not slots.reserve("few", SERVICE_S / 2), "then few would have two, and many one"

    slots = used(4, few="a", many="bcd")

    assert slots.reserve("few")
    assert slots.digests == ("a", "c", "d")
    assert (slots.num_of("few"), slots.num_of("many")) == (2, 2)


def test_how_long_an_adapter_serves_follows_from_how_long_loading_it_took() -> None:
    for load_s, service_s in ((0.0, MIN_SERVICE_S), (0.02, 0.02 * SERVICE_PER_LOAD), (60.0, SERVICE_S)):
        slots: Slots[str] = Slots(1)
        slots.reserve("x")
        slots.put("a", "A", "x", 0.0, load_s)

        assert not slots.reserve("x", service_s - 0.01)
        assert slots.reserve("x", service_s)


def test_a_tenant_without_a_slot_gets_anybodys_that_has_served() -> None:
    slots = used(2, x="a", y="b")

    assert not slots.reserve("z", SERVICE_S / 2)
    assert slots.reserve("z", SERVICE_S)
    assert slots.digests == ("b",)


def test_an_adapter_that_is_idle_for_long_makes_room_for_anybodys() -> None:
    slots = used(3, few="a", many="bc")
    for digest in "bc":
        slots.pin(digest, "many", 1.0)

    assert not slots.reserve("many", IDLE_S - 0.1)
    assert slots.reserve("many", IDLE_S)
    assert slots.digests == ("b", "c")


def test_an_adapter_is_the_tenants_that_used_it_last_and_before_that_nobodys() -> None:
    assert filled(1, "a").reserve("y"), "nobody's makes room at once"

    slots = filled(1, "a")
    slots.pin("a", "x")
    slots.unpin("a")

    assert slots.num_of("x") == 1
    assert not slots.reserve("y", SERVICE_S / 2)


def test_what_no_tenant_has_used_makes_room_at_once_and_takes_idle_slots_only() -> None:
    slots = filled(2, "a", "b")
    assert slots.reserve("x")
    slots.put("c", "c", "x")
    slots.pin("c", "x")
    assert slots.digests == ("b", "c")

    assert slots.reserve()
    slots.put("d", "d")
    assert slots.digests == ("c", "d")


def test_a_busy_adapter_drains_for_a_tenant_by_the_same_rules() -> None:
    slots = used(3, few="a", many="bc")
    for digest in "abc":
        slots.pin(digest, "few" if digest == "a" else "many", 0.5)

    slots.drain_one("many", SERVICE_S / 2)
    assert slots.digests == ("a", "b", "c")
    slots.drain_one("many", SERVICE_S)
    slots.drain_one("many", SERVICE_S)
    assert slots.digests == ("a", "c")
    slots.drain_one("new", SERVICE_S)

    assert slots.draining_for("b") == "many"
    assert slots.draining_for("c") == "new", "each tenant that waits has one"
    slots.keep_draining({"new"})
    assert slots.digests == ("a", "b")


@given(
    num_slots=st.integers(1, 6),
    wants=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9), st.floats(0.0, 3.0)), max_size=60),
)
def test_whoever_wants_however_many_no_tenant_in_use_falls_below_an_even_share(
    num_slots: int, wants: list[tuple[str, int, float]]
) -> None:
    """Every adapter is in use all the time, by sequences that end when it drains."""
    slots: Slots[str] = Slots(num_slots)
    now = 0.0
    for tenant, number, wait_s in wants:
        now += wait_s
        digest = f"{tenant}{number}"
        if digest in slots:
            continue
        before = {name: slots.num_of(name) for name in "xyz"}
        if not slots.reserve(tenant, now):
            slots.drain_one(tenant, now)
            drained = [each for each in slots_of(slots) if slots.draining_for(each) is not None]
            for each in drained:
                slots.unpin(each, now)
            if not drained:
                continue
            assert slots.reserve(tenant, now)
        slots.put(digest, digest, tenant, now)
        slots.pin(digest, tenant, now)
        slots.check()
        losers = [name for name in "xyz" if slots.num_of(name) < before[name]]
        assert all(
            slots.num_of(name) >= slots.num_of(tenant) or (before[tenant] == 0 and before[name] == 1) for name in losers
        )


def slots_of(slots: Slots[str]) -> list[str]:
    return [f"{tenant}{number}" for tenant in "xyz" for number in range(10) if f"{tenant}{number}" in slots]


@given(
    num_slots=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from("prudoc"), st.sampled_from("abcd")), max_size=60),
)
def test_whatever_happens_pinned_adapters_stay_and_slots_are_not_exceeded(
    num_slots: int, moves: list[tuple[str, str]]
) -> None:
    slots: Slots[str] = Slots(num_slots)
    pins: dict[str, int] = {}
    for move, digest in moves:
        if move == "p" and slots.pin(digest) is not None:
            pins[digest] = pins.get(digest, 0) + 1
        elif move == "r" and digest not in slots and slots.reserve():
            slots.put(digest, digest)
        elif move == "u" and pins.get(digest):
            pins[digest] -= 1
            slots.unpin(digest)
        elif move == "d":
            slots.drop(digest)
        elif move == "o" and slots.reserve():
            slots.unreserve()
        elif move == "c" and not slots.reserve():
            slots.drain_one()
        elif move == "c":
            slots.unreserve()
        slots.check()
        assert all(digest in slots for digest, count in pins.items() if count)


def test_each_adapter_that_leaves_its_slot_is_told_once_before_another_has_it() -> None:
    evicted: list[str] = []
    slots: Slots[str] = Slots(2, lambda left: evicted.append(left.adapter))
    for digest in "abc":
        assert slots.reserve()
        slots.put(digest, digest.upper())
    assert evicted == ["A"]
    slots.pin("b")
    slots.drop("b")
    slots.drop("c")
    assert evicted == ["A", "C"]
    slots.unpin("b")

    assert evicted == ["A", "C", "B"]
    slots.check()


def test_an_adapter_that_drained_for_another_is_told_with_its_last_pin() -> None:
    evicted: list[Left[str]] = []
    slots: Slots[str] = Slots(1, evicted.append)
    slots.reserve()
    slots.put("a", "A", now=-SERVICE_S)
    slots.pin("a", "x")
    slots.drain_one()
    assert evicted == []
    slots.unpin("a")

    assert evicted == [Left("A", "x", is_dropped=False)]


def test_of_an_adapter_that_was_deleted_it_is_told_so() -> None:
    left: list[Left[str]] = []
    slots: Slots[str] = Slots(2, left.append)
    for digest in "ab":
        slots.reserve("x")
        slots.put(digest, digest.upper(), "x")
    slots.pin("a", "x")
    slots.drop("a")
    slots.drop("b")
    assert left == [Left("B", "x", is_dropped=True)]
    slots.unpin("a")

    assert left[1:] == [Left("A", "x", is_dropped=True)]
