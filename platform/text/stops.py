"""Stop strings over text that comes in pieces: one automaton for all sequences of a request, a few fields for each.

Invariant: what is emitted is the text up to the match that is complete first (all of it where none occurs), however the
text was cut; of two complete at the same character the longer one counts. A suffix that may yet become a stop string is
held back, nothing more. Source: Aho and Corasick, Efficient string matching, CACM 18 (1975).
"""

from collections.abc import Iterable

_NUM_CODES = 0x110000


class StopAutomaton:
    """The automaton of some stop strings, which nothing changes once it is made. stops: non-empty strings.

    A state is a prefix of a stop string: 0 is the empty one, and there are as many others as characters at most, of
    about 120 bytes each. Reading a character takes constant time on average over a text.
    """

    __slots__ = ("depths", "edges", "fallbacks", "matched", "starts")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.edges: dict[int, int] = {}
        """State behind a state and a character, by `key`."""
        self.depths = [0]
        """Characters of each state."""
        self.fallbacks = [0]
        """The longest other state that is a suffix of each state."""
        self.matched = [0]
        """Characters of the longest stop string that is a suffix of each state; 0: none is."""
        parents = [(0, 0)]  # state and code before each state
        for stop in stops:
            self._add(stop, parents)
        for state in sorted(range(1, len(parents)), key=self.depths.__getitem__):
            parent, code = parents[state]
            self._fall_back(state, parent, code)
        self.starts = frozenset(chr(key) for key in self.edges if key < _NUM_CODES)
        """First characters of the stop strings."""

    def _add(self, stop: str, parents: list[tuple[int, int]]) -> None:
        state = 0
        for code in map(ord, stop):
            following = self.edges.setdefault(state * _NUM_CODES + code, len(parents))
            if following == len(parents):
                parents.append((state, code))
                self.depths.append(self.depths[state] + 1)
                self.fallbacks.append(0)
                self.matched.append(0)
            state = following
        self.matched[state] = len(stop)

    def _fall_back(self, state: int, parent: int, code: int) -> None:
        """Fill in a state whose shorter ones are done."""
        if parent:
            before = self.fallbacks[parent]
            while before and before * _NUM_CODES + code not in self.edges:
                before = self.fallbacks[before]
            self.fallbacks[state] = self.edges.get(before * _NUM_CODES + code, 0)
        self.matched[state] = self.matched[state] or self.matched[self.fallbacks[state]]


NO_STOPS = StopAutomaton()


class StopStrings:
    """The stop strings of one sequence. At most the longest one, less a character, is held back. keeps_stop: the one
    that is hit is emitted too."""

    __slots__ = ("_automaton", "_has_stopped", "_held", "_keeps_stop", "_state", "hit")

    def __init__(self, automaton: StopAutomaton, keeps_stop: bool = False) -> None:
        self._automaton = automaton
        self._keeps_stop = keeps_stop
        self._state = 0
        self._held = ""
        self._has_stopped = False
        self.hit: str | None = None
        """The stop string that was hit; None: none was."""

    def push(self, text: str) -> tuple[str, bool]:
        """(text safe to emit, whether a stop string has been hit). The stop string itself is left out, unless it
        is kept, and all that follows it."""
        automaton, state = self._automaton, self._state
        if self._has_stopped:
            return "", True
        if not state and automaton.starts.isdisjoint(text):
            return text, False
        edges, fallbacks, matched = automaton.edges, automaton.fallbacks, automaton.matched
        for count, code in enumerate(map(ord, text), 1):
            following = edges.get(state * _NUM_CODES + code)
            while following is None and state:
                state = fallbacks[state]
                following = edges.get(state * _NUM_CODES + code)
            state = following or 0
            if matched[state]:
                return self._stop(text[:count], matched[state]), True
        text = self._held + text
        safe = len(text) - automaton.depths[state]
        self._state, self._held = state, text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, text: str, num_matched: int) -> str:
        """The text before the stop string that ends `text`, or with it."""
        text, self._held, self._has_stopped = self._held + text, "", True
        self.hit = text[len(text) - num_matched :]
        return text if self._keeps_stop else text[: len(text) - num_matched]
