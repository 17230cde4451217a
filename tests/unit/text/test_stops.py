"""Stop strings, whole and in pieces."""

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stops import StopAutomaton, StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """Everything emitted, and whether it stopped."""
    watch, out = StopStrings(StopAutomaton(stops)), ""
    for piece in pieces:
        text, is_hit = watch.push(piece)
        out += text
        if is_hit:
            return out, True
    return out + watch.finish(), False


def test_a_stop_string_over_several_pieces_is_left_out() -> None:
    assert run(("STOP",), ["a S", "T", "O", "P b"]) == ("a ", True)


def test_what_only_looked_like_a_stop_string_comes_out_after_all() -> None:
    watch = StopStrings(StopAutomaton(("\n\n",)))

    assert watch.push("a\n") == ("a", False)
    assert watch.push("b") == ("\nb", False)
    assert watch.push("c\n") == ("c", False)
    assert watch.finish() == "\n"
    assert watch.finish() == ""


def test_nothing_is_emitted_behind_a_stop_string() -> None:
    watch = StopStrings(StopAutomaton(("x",)))

    assert watch.push("1x2") == ("1", True)
    assert watch.push("3") == ("", True)
    assert watch.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    assert run((), ["a", "", "b"]) == ("ab", False)


def test_the_match_that_is_complete_first_wins() -> None:
    assert run(("abcd", "bc"), ["abcd"]) == ("a", True)
    assert run(("abc", "bc"), ["xabc"]) == ("x", True)


def naive(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


pieces = st.lists(st.text("ab\n", max_size=5), max_size=8)
some_stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


@given(some_stops, pieces)
def test_the_cut_of_the_pieces_does_not_matter(stops: tuple[str, ...], parts: list[str]) -> None:
    assert run(stops, parts) == naive(stops, "".join(parts))


@given(some_stops, pieces)
def test_only_what_may_become_a_stop_string_is_held_back(stops: tuple[str, ...], parts: list[str]) -> None:
    watch, out, seen = StopStrings(StopAutomaton(stops)), "", ""
    for part in parts:
        text, is_hit = watch.push(part)
        out, seen = out + text, seen + part
        if is_hit:
            break
        held = seen[len(out) :]
        assert seen == out + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(
            len(seen) - cut > len(held) and stop.startswith(seen[cut:]) for cut in range(len(seen)) for stop in stops
        )


class Prefixes:
    """The definition before the automaton: all prefixes of all stop strings, looked for one after the other."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._held = ""
        self._has_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        if self._has_stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._has_stopped = "", True
            return text[: min(matches)[1]], True
        self._held = next((prefix for prefix in self._prefixes if text.endswith(prefix)), "")
        return text[: len(text) - len(self._held)], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@given(
    st.lists(st.text("ab\U0001f600", min_size=1, max_size=7), min_size=1, max_size=6).map(tuple),
    st.lists(st.text("ab\U0001f600", max_size=9), max_size=12),
)
def test_piece_by_piece_it_says_what_a_search_for_all_prefixes_says(stops: tuple[str, ...], parts: list[str]) -> None:
    watch, oracle = StopStrings(StopAutomaton(stops)), Prefixes(stops)

    assert [watch.push(part) for part in parts] == [oracle.push(part) for part in parts]
    assert watch.finish() == oracle.finish()
    assert watch.push("") == oracle.push("")


def most_stops() -> tuple[str, ...]:
    """The most and longest stop strings that a request may have, with no prefix in common."""
    return tuple(f"{number:x}" + "ab" * 127 + "c" for number in range(16))


def test_the_largest_automaton_is_small_and_a_sequence_adds_next_to_nothing() -> None:
    tracemalloc.start()
    try:
        automaton = StopAutomaton(most_stops())
        shared = tracemalloc.get_traced_memory()[0]
        watches = [StopStrings(automaton) for _ in range(128)]
        alone = (tracemalloc.get_traced_memory()[0] - shared) / len(watches)
    finally:
        tracemalloc.stop()

    assert shared < 2**20
    assert alone < 256


def test_a_character_costs_the_same_whatever_the_number_and_length_of_the_stop_strings() -> None:
    """Steps are counted, for clocks are not steady: every look-up of the automaton is one."""

    class Counting(dict[int, int]):
        num_gets = 0

        def get(self, key: int, default: object = None) -> Any:
            type(self).num_gets += 1
            return super().get(key, default)

    automaton = StopAutomaton(most_stops())
    automaton.edges = Counting(automaton.edges)
    watch = StopStrings(automaton)
    text = ("1" + "ab" * 126 + "x") * 40

    emitted = "".join(watch.push(char)[0] for char in text)

    assert emitted == text
    assert Counting.num_gets <= 2 * len(text) + 1


def test_a_kept_stop_string_is_emitted_and_nothing_behind_it() -> None:
    watch = StopStrings(StopAutomaton(("STOP", "x")), keeps_stop=True)

    assert watch.push("a S") == ("a ", False)
    assert watch.push("TOP b") == ("STOP", True)
    assert watch.push("c") == ("", True)
    assert watch.finish() == ""
