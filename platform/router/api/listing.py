"""Pages of long lists, as OpenAI's clients ask for them: `after` an id, up to `limit` items."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs

from penstock.wire.errors import InvalidRequest

T = TypeVar("T")

MAX_QUERY_BYTES = 4096


class PageQuery(NamedTuple):
    """What a list is asked for."""

    after: str | None
    """Id of the last item of the page before; None: from the beginning."""
    limit: int
    is_ascending: bool
    purpose: str | None


def read_query(query: bytes, default_limit: int, max_limit: int) -> PageQuery:
    """What a request's query asks for; parameters that are not known are ignored. Raises InvalidRequest."""
    found = read_parameters(query)
    limit = found.get("limit", str(default_limit))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= max_limit:
        raise InvalidRequest(f"'limit' must lie in 1..{max_limit}.", param="limit")
    order = found.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    return PageQuery(found.get("after"), int(limit), order == "asc", found.get("purpose"))


def read_parameters(query: bytes) -> dict[str, str]:
    """The parameters of a request's query; of those given twice the last. Raises InvalidRequest."""
    if len(query) > MAX_QUERY_BYTES:
        raise InvalidRequest(f"The query has more than {MAX_QUERY_BYTES} bytes.")
    try:
        return {name: values[-1] for name, values in parse_qs(query.decode("ascii"), max_num_fields=32).items()}
    except ValueError:
        raise InvalidRequest("The query can't be read.") from None


def page(items: Sequence[T], ids: Sequence[str], query: PageQuery) -> tuple[list[T], bool]:
    """The items that are asked for, and whether there are more. ids: of the items, in their order. An `after` that is
    not among them gives nothing."""
    begin = 0
    if query.after is not None:
        if query.after not in ids:
            return [], False
        begin = ids.index(query.after) + 1
    end = begin + query.limit
    return list(items[begin:end]), end < len(items)
