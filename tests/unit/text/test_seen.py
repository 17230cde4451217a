"""What is remembered of texts: for whom, how much, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.seen import ENTRY_BYTES, SeenTexts

SALT, OTHER_SALT = b"s" * 32, b"o" * 32
QWEN, LLAMA = b"qwen", b"llama"


def test_a_text_is_found_by_those_who_left_it_and_by_nobody_else() -> None:
    seen = SeenTexts()
    own = seen.scope("tenant-1", SALT)
    own.keep(own.key(QWEN, "a text"), b"ids.")

    again, of_part, other = (seen.scope(*who) for who in (("tenant-1", SALT), ("tenant-1", OTHER_SALT), ("t-2", SALT)))
    assert again.find(again.key(QWEN, "a text")) == b"ids."
    assert again.find(again.key(QWEN, "another")) is None
    assert again.find(again.key(LLAMA, "a text")) is None
    assert of_part.find(of_part.key(QWEN, "a text")) is None
    assert other.find(other.key(QWEN, "a text")) is None


def test_keys_say_nothing_of_the_text_to_who_has_not_the_secret_of_the_process() -> None:
    keys = {SeenTexts().scope("tenant-1", SALT).key(QWEN, "a text") for _ in range(20)}

    assert len(keys) == 20


@pytest.mark.parametrize("text", ["\ud800", "日本", "\x00"])
def test_any_text_has_a_key(text: str) -> None:
    scope = SeenTexts().scope("tenant-1", SALT)

    assert scope.key(QWEN, text) != scope.key(QWEN, text + " ")


def test_a_tenants_texts_give_way_to_its_own_alone() -> None:
    seen = SeenTexts(max_tenant_bytes=2 * (ENTRY_BYTES + 8), max_tenants=3)
    quiet, busy = seen.scope("quiet", SALT), seen.scope("busy", SALT)
    kept = quiet.key(QWEN, "kept")
    quiet.keep(kept, bytes(8))
    for number in range(100):
        busy.keep(busy.key(QWEN, str(number)), bytes(8))

    assert quiet.find(kept) == bytes(8)
    assert [number for number in range(100) if busy.find(busy.key(QWEN, str(number)))] == [98, 99]


def test_a_text_that_was_found_stays_longer_than_one_that_was_not() -> None:
    seen = SeenTexts(max_tenant_bytes=2 * (ENTRY_BYTES + 8))
    scope = seen.scope("tenant-1", SALT)
    for text in ("a", "b"):
        scope.keep(scope.key(QWEN, text), bytes(8))
    scope.find(scope.key(QWEN, "a"))
    scope.keep(scope.key(QWEN, "c"), bytes(8))

    assert scope.find(scope.key(QWEN, "a")) is not None
    assert scope.find(scope.key(QWEN, "b")) is None


def test_the_tenant_that_asked_least_recently_gives_way() -> None:
    seen = SeenTexts(max_tenants=2)
    first, second, third = (seen.scope(name, SALT) for name in ("first", "second", "third"))
    for scope in (first, second):
        scope.keep(scope.key(QWEN, "a"), b"ids.")
    first.find(first.key(QWEN, "a"))
    third.keep(third.key(QWEN, "a"), b"ids.")

    assert [scope.find(scope.key(QWEN, "a")) for scope in (first, second, third)] == [b"ids.", None, b"ids."]


@given(sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 500)), max_size=60))
def test_what_is_held_stays_within_the_bounds(sizes: list[tuple[int, int, int]]) -> None:
    seen = SeenTexts(max_tenant_bytes=1000, max_tenants=3)
    for tenant, text, size in sizes:
        scope = seen.scope(f"tenant-{tenant}", SALT)
        scope.keep(scope.key(QWEN, str(text)), bytes(size))
        assert seen.num_bytes <= 3 * 1000
        assert scope.find(scope.key(QWEN, str(text))) == bytes(size)


def test_a_text_that_is_more_than_a_tenants_room_is_not_held() -> None:
    seen = SeenTexts(max_tenant_bytes=1000)
    scope = seen.scope("tenant-1", SALT)
    scope.keep(scope.key(QWEN, "long"), bytes(1001))

    assert seen.num_bytes == 0
