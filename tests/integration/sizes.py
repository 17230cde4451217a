"""How much the longest tests try: all that is claimed with PENSTOCK_TEST_FULL set, a part of it without, so that
`make test-slow` stays below half an hour."""

import os


def full(count: int, few: int) -> int:
    """`count` where PENSTOCK_TEST_FULL is set, else `few`."""
    return count if os.environ.get("PENSTOCK_TEST_FULL") else few
