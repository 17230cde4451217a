"""The official Kubernetes client (`kubernetes.aio`) as the autoscaler uses it: with the rights of its pod's service
account, a timeout for every call, and a count of all calls.

Whatever fails raises ApiException or a subclass of it: also where no answer came, with the status NO_ANSWER. Nothing is
sent a second time behind the caller's back: every caller has a loop of its own.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.client.rest import RESTClientObject, RESTResponse

from penstock.base.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's token and certificate authority."""
CALL_S = 5.0
"""Longest time that a call waits for a connection, and for the next bytes of an answer; a watch excepted."""
WATCH_S = 60
"""The server ends a watch after that, and a new one is begun."""
MAX_EVENT_BYTES = 2**21
"""Longest line of a watch, which is one object with its status: etcd takes 1.5 MiB."""
WATCH_MARGIN_S = 10.0
"""A watch that was not ended so long after its time is dead."""
NO_ANSWER = 0
"""Status of an ApiException where the server did not answer: the request may have been executed or not."""
GONE = 410
"""Status of a watch whose version the server has forgotten: a new list is needed."""
JSON_PATCH = "application/json-patch+json"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

CountCall = Callable[[str, str, str], None]
"""Called with verb, resource and status of every call; the status is `away` where no answer came."""


class Account(NamedTuple):
    """The API server's URL, and the folder with the files of a service account."""

    server: str
    folder: Path
    """Holds `token`, which Kubernetes replaces now and then, and `ca.crt`."""


def account_of(environment: Mapping[str, str], folder: Path = ACCOUNT) -> Account:
    """The account that Kubernetes gives a pod. Raises ConfigError outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "KUBERNETES_SERVICE_HOST is not set: penstock autoscale runs in a pod, by the rights of its service account"
        )
    for name in ("token", "ca.crt"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder / name} is missing: the pod has no service account token (automountServiceAccountToken)"
            )
    return Account(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)


@asynccontextmanager
async def open_client(
    account: Account, count: CountCall | None = None, call_s: float = CALL_S
) -> AsyncIterator[ApiClient]:
    """A client for the API classes of `kubernetes.aio.client`. call_s: see `CALL_S`."""

    def read_token(configuration: Configuration) -> None:
        try:
            token = (account.folder / "token").read_text(encoding="ascii").strip()
        except OSError as error:
            raise no_answer("the token's file", error) from error
        configuration.api_key["BearerToken"] = f"Bearer {token}"

    configuration = Configuration(
        host=account.server,
        ssl_ca_cert=str(account.folder / "ca.crt"),
        client_session_kwargs={"trust_env": False, "middlewares": (send_once,), "read_bufsize": MAX_EVENT_BYTES},
    )
    configuration.refresh_api_key_hook = read_token  # called for every request: Kubernetes replaces the token
    read_token(configuration)
    client = ApiClient(configuration)
    client.rest_client = CheckedRest(client.rest_client, count, call_s)
    try:
        yield client
    finally:
        await client.close()


class CheckedRest:
    """The client's HTTP layer with a timeout on every call, a count of all calls, and one kind of exception."""

    def __init__(self, rest: RESTClientObject, count: CountCall | None, call_s: float) -> None:
        self._rest = rest
        self._count = count
        self._timeout = aiohttp.ClientTimeout(total=None, connect=call_s, sock_read=call_s)
        self._watch_timeout = aiohttp.ClientTimeout(total=None, connect=call_s, sock_read=WATCH_S + WATCH_MARGIN_S)

    async def request(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None = None,
        body: object = None,
        post_params: object = None,
        _request_timeout: object = None,  # part of the client's signature; here every call has the same
    ) -> RESTResponse:
        """An answer whose body has been read, but for a watch. Raises ApiException."""
        verb, resource = name_call(method, url)
        is_watch = verb == "watch"
        try:
            timeout = self._watch_timeout if is_watch else self._timeout
            response = await self._rest.request(method, url, headers, body, post_params, timeout)
            is_error = response.status >= 300
            if is_error or not is_watch:
                await response.read()
        except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError is one
            self._note(verb, resource, "away")
            raise no_answer(f"{method} {urlsplit(url).path}", error) from error
        self._note(verb, resource, str(response.status))
        if is_error:
            raise ApiException.from_response(http_resp=response, body=None, data=None)
        return response

    async def close(self) -> None:
        await self._rest.close()

    def _note(self, verb: str, resource: str, status: str) -> None:
        if self._count is not None:
            self._count(verb, resource, status)


async def send_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A middleware of aiohttp, which else sends a GET or a PUT again when a connection that was kept open breaks."""
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(type(error).__name__) from error  # aiohttp repeats no other class


def no_answer(what: str, error: Exception) -> ApiException:
    return ApiException(status=NO_ANSWER, reason=f"{what}: {type(error).__name__}")


def is_unavailable(error: ApiException) -> bool:
    """Whether the same request may succeed later: the server did not answer, or its answer does not concern the
    request."""
    return error.status in (NO_ANSWER, 429) or error.status >= 500


UNREADABLE = (ValueError, LookupError, TypeError)
"""What an answer raises that is not of the form that Kubernetes' API defines: of a proxy, say."""


def describe(error: Exception) -> str:
    """One line for a log: status, reason, and what the server wrote about it. Of other errors only the class: a proxy's
    page may hold anything."""
    if not isinstance(error, ApiException):
        return f"unreadable answer: {type(error).__name__}"
    if error.status == NO_ANSWER:
        return str(error.reason)
    try:
        message = msgspec.json.decode(error.body or "{}").get("message", "")
    except (msgspec.DecodeError, AttributeError):  # a proxy's page, or JSON of another shape
        message = ""
    return f"{error.status} {error.reason}: {message}"


def name_call(method: str, url: str) -> tuple[str, str]:
    """Verb and resource of a call, as RBAC names them. Paths are `/api/v1/...` or `/apis/GROUP/VERSION/...`, then
    `namespaces/NAME/` where the resource has a namespace, then the plural and perhaps an object's name."""
    parts = urlsplit(url)
    path = parts.path.strip("/").split("/")
    path = path[2:] if path[0] == "api" else path[3:]
    if path[0] == "namespaces" and len(path) > 2:
        path = path[2:]
    if method != "GET":
        return VERBS[method], path[0]
    if "watch=true" in parts.query.split("&"):
        return "watch", path[0]
    return "get" if len(path) > 1 else "list", path[0]
