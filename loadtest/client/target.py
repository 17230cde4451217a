"""The server under test: where it is, what it serves, and the tenants' keys."""

import asyncio
from urllib.parse import urlsplit

import msgspec

from penstock_loadtest.client.connection import USER_AGENT, Connection, Connections, Headers, parse_origin
from penstock_loadtest.errors import TargetUnreachable

MAX_PAGE_BYTES = 16 << 20


class Target(msgspec.Struct, frozen=True):
    """The server under test, with one of its models and the tenants' keys."""

    url: str
    """Base URL of the API, without a slash at its end."""
    model: str
    models: list[str]
    keys: dict[str, str]
    """API key by tenant."""
    exact: bool | None
    """Whether the model's greedy and seeded answers never change, as /v1/models reports under `exact`; None: it does
    not report it."""
    metrics_url: str | None

    def __repr__(self) -> str:
        return f"Target({self.url}, {self.model})"  # keys are nobody's business

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("url", self.url), ("model", self.model)]


class _Model(msgspec.Struct):
    id: str
    exact: bool | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Page:
    """Listener that collects one small response."""

    def __init__(self) -> None:
        self.status = 0
        self.body: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, _headers: Headers) -> None:
        self.status = status

    def on_body(self, data: bytes, _at: float) -> None:
        self.body.append(data)
        if sum(map(len, self.body)) > MAX_PAGE_BYTES:
            self._fail(f"sent a page of more than {MAX_PAGE_BYTES} bytes")

    def on_end(self, _at: float) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_broken(self, reason: str, _at: float, _is_unanswered: bool) -> None:
        self._fail(f"did not answer: {reason}")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(TargetUnreachable(why))


async def get_page(connections: Connections, path: str, timeout_s: float, key: str | None = None) -> tuple[int, bytes]:
    """Status and body of a page, on a connection of its own. Raises TargetUnreachable."""
    where = connections.origin.host_header
    connection: Connection | None = None
    page = _Page()
    try:
        async with asyncio.timeout(timeout_s):
            connection = await connections.connect(timeout_s)
            head = (
                f"GET {path} HTTP/1.1\r\nhost: {where}\r\nuser-agent: {USER_AGENT}\r\naccept: */*\r\n"
                f"connection: close\r\n{format_authorization(key)}\r\n"
            )
            connection.request(head.encode(), page)
            await page.done
    except TimeoutError:
        raise TargetUnreachable(f"{where} did not answer within {timeout_s:g} s.") from None
    except TargetUnreachable as error:
        raise error if str(error).startswith(where) else TargetUnreachable(f"{where} {error}.") from None
    finally:
        if connection is not None:
            connection.close()
    return page.status, b"".join(page.body)


def format_authorization(key: str | None) -> str:
    """The header's line; empty without a key."""
    return f"authorization: Bearer {key}\r\n" if key else ""


async def find_target(url: str, *, keys: dict[str, str], model: str | None = None, timeout_s: float = 1.0) -> Target:
    """The server with the models that it lists. url: with or without /v1. model: None takes the first it lists.

    Raises TargetUnreachable within timeout_s, with one sentence: not there, not speaking the API, refusing the key, not
    serving the model.
    """
    origin = parse_origin(url)
    if "?" in url or "#" in url:
        raise TargetUnreachable(
            f"{url} ends in a query or a fragment; the base URL is followed by /models and /chat/completions."
        )
    base = _make_base_url(url)
    for tenant, key in keys.items():
        if not (key.isascii() and key.isprintable()):
            raise TargetUnreachable(
                f"The API key of tenant {tenant} can't be sent: it has a line break, or a character that is not ASCII."
            )
    connections = Connections(origin)
    try:
        status, body = await get_page(
            connections, f"{path_with_query(base)}/models", timeout_s, next(iter(keys.values()), None)
        )
    finally:
        await connections.wait_closed()
    listed = _decode_models(base, status, body)
    names = [entry.id for entry in listed]
    if model is not None and model not in names:
        raise TargetUnreachable(f"{base} does not serve {model}; it serves {', '.join(names[:10]) or 'nothing'}.")
    if not names:
        raise TargetUnreachable(f"{base} serves no model.")
    chosen = model or names[0]
    exact = next(entry.exact for entry in listed if entry.id == chosen)
    return Target(
        base, chosen, names, dict(keys), exact, f"{'https' if origin.is_tls else 'http'}://{origin.host_header}/metrics"
    )


def path_with_query(url: str) -> str:
    """The part of a URL after scheme and host, with the query; empty where there is none."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _make_base_url(url: str) -> str:
    trimmed = url.rstrip("/")
    return trimmed if path_with_query(trimmed) else f"{trimmed}/v1"


def _decode_models(base: str, status: int, body: bytes) -> list[_Model]:
    if status in (401, 403):
        raise TargetUnreachable(
            f"{base} refuses the API key (HTTP {status}); it is taken from OPENAI_API_KEY, or from a tenant's key_env."
        )
    if status != 200:
        raise TargetUnreachable(
            f"{base}/models answers HTTP {status}; is this the base URL of an OpenAI-compatible API?"
        )
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise TargetUnreachable(
            f"{base}/models does not answer with a list of models; is this the base URL of an OpenAI-compatible API?"
        ) from None
