"""Names that were meant by misspelled ones, out of a known set: one letter more, less, other, or two swapped; another
case or hyphens.

Two names that differ so little have a form in common when a letter is left out of one or both. The forms of the known
names are made once (Garbe's symmetric deletes, 2012), so that a look-up costs as many steps as the name has letters,
however many names are known.
"""

from collections.abc import Iterable, Iterator, Mapping

MIN_CHARS = 6
"""Shortest known name, in letters and digits, for which letters may differ: of shorter ones too many others are only a
letter away (top_k, top_a)."""
MAX_CHARS = 40
"""Longest name that is looked at."""


class NearMisses:
    """names: what may have been meant. aliases: other words for some of them."""

    def __init__(self, names: Iterable[str], aliases: Mapping[str, str]) -> None:
        self._forms: dict[str, str] = {}
        known = sorted(names)
        for name in known:
            self._forms[_plain(name)] = name
        for alias, name in aliases.items():
            self._forms.setdefault(_plain(alias), name)
        for name in known:
            plain = _plain(name)
            for form in _shorter(plain) if len(plain) >= MIN_CHARS else ():
                self._forms.setdefault(form, name)

    def find(self, name: str) -> str | None:
        """What was probably meant by a name that is not known; None if nothing is near."""
        plain = _plain(name[: MAX_CHARS + 1])
        if len(plain) > MAX_CHARS:
            return None
        found = self._forms.get(plain)
        if found is not None or len(plain) < MIN_CHARS:
            return found
        return next((self._forms[form] for form in _shorter(plain) if form in self._forms), None)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()


def _shorter(plain: str) -> Iterator[str]:
    return (plain[:index] + plain[index + 1 :] for index in range(len(plain)))
