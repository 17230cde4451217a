"""`python -m bench.gpu`, which says what it needs on a Python that is too old for the rest. `bench.gpu.command` is the
command."""

import sys

OLDEST = (3, 11)
"""First version of Python that the rest is written for."""


def refusal(version: tuple[int, ...]) -> str | None:
    """A sentence where this version of Python can't run the rest."""
    if version[: len(OLDEST)] >= OLDEST:
        return None
    needed, own = (".".join(map(str, numbers[:2])) for numbers in (OLDEST, version))
    return f"bench.gpu: this needs Python {needed} or newer, and {sys.executable} is {own}"


if __name__ == "__main__":
    if sentence := refusal(sys.version_info[:3]):
        sys.stderr.write(f"{sentence}\n")
        sys.exit(2)
    from bench.gpu.command import main  # here, because an older Python can't import it

    sys.exit(main())
