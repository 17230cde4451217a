import pytest

from penstock.router.api.listing import PageQuery, page, read_query
from penstock.wire.errors import InvalidRequest


def test_a_query_is_read_and_what_is_not_known_is_ignored() -> None:
    assert read_query(b"", 20, 100) == PageQuery(None, 20, False, None)
    assert read_query(b"after=file-1&limit=5&order=asc&purpose=batch&x=%ff", 20, 100) == PageQuery(
        "file-1", 5, True, "batch"
    )


@pytest.mark.parametrize(
    "query",
    [b"limit=0", b"limit=101", b"limit=-1", b"limit=x", b"limit=%C2%B2", b"limit=" + b"9" * 99, b"order=up", b"\xff"],
)
def test_what_cant_be_asked_is_refused(query: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_query(query, 20, 100)


def test_a_query_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        read_query(b"a=1&" * 5000, 20, 100)
    with pytest.raises(InvalidRequest):
        read_query(b"a=1&" * 500, 20, 100)


def test_pages_follow_each_other_to_the_end() -> None:
    items = ["a", "b", "c", "d", "e"]

    assert page(items, items, PageQuery(None, 2, False, None)) == (["a", "b"], True)
    assert page(items, items, PageQuery("b", 2, False, None)) == (["c", "d"], True)
    assert page(items, items, PageQuery("d", 2, False, None)) == (["e"], False)
    assert page(items, items, PageQuery("nothing", 2, False, None)) == ([], False)
    assert page([], [], PageQuery(None, 2, False, None)) == ([], False)
