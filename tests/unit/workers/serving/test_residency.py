from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.serving.residency import Slots


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
