"""Stop strings, whole and in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stops import StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """Everything emitted, and whether it stopped."""
    watch, out = StopStrings(stops), ""
    for piece in pieces:
        text, is_hit = watch.push(piece)
        out += text
        if is_hit:
            return out, True
    return out + watch.finish(), False


def test_a_stop_string_over_several_pieces_is_left_out() -> None:
    assert run(("STOP",), ["a S", "T", "O", "P b"]) == ("a ", True)


def test_what_only_looked_like_a_stop_string_comes_out_after_all() -> None:
    watch = StopStrings(("\n\n",))

    assert watch.push("a\n") == ("a", False)
    assert watch.push("b") == ("\nb", False)
    assert watch.push("c\n") == ("c", False)
    assert watch.finish() == "\n"
    assert watch.finish() == ""


def test_nothing_is_emitted_behind_a_stop_string() -> None:
    watch = StopStrings(("x",))

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
    watch, out, seen = StopStrings(stops), "", ""
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
