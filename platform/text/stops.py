"""Stop strings over text that comes in pieces.

Invariant: what is emitted is the text up to the match that is complete first (all of it where none occurs), however the
text was cut; of two complete at the same character the longer one counts. A suffix that may yet become a stop string is
held back, nothing more.
"""


class StopStrings:
    """The stop strings of one sequence. stops: non-empty strings, a handful. At most the longest one, less a character,
    is held back."""

    __slots__ = ("_has_stopped", "_held", "_prefixes", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._prefixes = tuple(sorted(prefixes, key=len, reverse=True))
        self._held = ""
        self._has_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text safe to emit, whether a stop string has been hit). The stop string itself is left out, and all that
        follows it."""
        if not self._stops:
            return text, False
        if self._has_stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._has_stopped = "", True
            return text[: min(matches)[1]], True
        held = next((prefix for prefix in self._prefixes if text.endswith(prefix)), "")
        self._held = held
        return text[: len(text) - len(held)], False

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held
