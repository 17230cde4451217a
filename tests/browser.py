"""A headless Chromium for tests of pages, driven by its DevTools protocol; no driver of its own is needed.

PENSTOCK_TEST_CHROMIUM names the program where it is none of PROGRAMS.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, as in a container, it has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
)
CALL_S = 30.0
"""Longest wait for an answer of the browser, and for a condition on a page."""
LISTENING = "DevTools listening on ws://"


class PageError(Exception):
    """A script that a test gave to a page has failed, or the protocol has."""


def find_chromium() -> str | None:
    """Path of the program; None where there is none."""
    named = os.environ.get("PENSTOCK_TEST_CHROMIUM")
    if named is not None:
        return named
    return next((path for path in map(shutil.which, PROGRAMS) if path is not None), None)


@contextmanager
def running_chromium(program: str, profile: Path) -> Iterator[str]:
    """Start it with an empty profile in the folder; yields the address of its protocol, http://HOST:PORT. Raises
    PageError if it ends at once."""
    log = profile.with_suffix(".log")
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield f"http://{_wait_for_address(process, log)}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _wait_for_address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while True:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(LISTENING) and "/" in line.removeprefix(LISTENING):  # the line is whole
                return line.removeprefix(LISTENING).partition("/")[0]
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise PageError(f"Chromium has ended with {process.returncode}: {log.read_text(errors='replace')[-2000:]}")


class Tab:
    """A tab of its own, with what it asked for and what went wrong in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requested: list[str] = []
        """Addresses of all requests."""
        self.errors: list[str] = []
        """Uncaught exceptions and what the console calls errors; violations of the page's policy are among them."""

    async def listen(self) -> None:
        """Take what the browser says, until the tab is closed."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                pending = self._pending.pop(said["id"])
                if not pending.done():  # it may have been given up
                    pending.set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requested.append(said["params"]["request"]["url"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Raises PageError."""
        number = next(self._numbers)
        pending = self._pending[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(CALL_S):
            said = await pending
        if "error" in said:
            raise PageError(f"{method}: {said['error']}")
        found: dict[str, Any] = said["result"]
        return found

    async def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression on the page, once it has settled. Raises PageError."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise PageError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until the JavaScript expression is true. Raises PageError after CALL_S with the page's text."""
        end = asyncio.get_running_loop().time() + CALL_S / 2
        check = f"const check = () => ({condition}) ? go(true) : setTimeout(check, 10); check();"
        waiting = f"new Promise(go => {{ {check} }})"
        try:
            async with asyncio.timeout_at(end):
                await self.evaluate(waiting)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise PageError(f"never true: {condition}\n{text[:2000]}\n{self.errors}") from None

    async def open(self, url: str) -> None:
        """Go there; returns when the page has run its scripts."""
        found = await self.call("Page.navigate", url=url)
        if "errorText" in found:
            raise PageError(f"{url}: {found['errorText']}")
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def type(self, element: str, text: str) -> None:
        """Put text into the field with that id, in place of what is there, as a keyboard does."""
        await self.evaluate(f"(field => {{ field.focus(); field.select(); }})(document.getElementById('{element}'))")
        await self.call("Input.insertText", text=text)

    async def click(self, element: str) -> None:
        await self.evaluate(f"document.getElementById('{element}').click()")

    async def press(self, key: str, code: int, *, is_ctrl: bool = False) -> None:
        """Press a key and let it go. key: its name, such as Escape; code: its Windows virtual key code."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if is_ctrl else 0}
        typed = {"type": "keyDown", "text": "\r"} if key == "Enter" and not is_ctrl else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **typed, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def text(self, element: str) -> str:
        """Text of the element with that id."""
        return str(await self.evaluate(f"document.getElementById('{element}').textContent"))


@asynccontextmanager
async def open_tab(address: str) -> AsyncIterator[Tab]:
    """A new tab of the browser at `address`, closed at the end."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{address}/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            listening = asyncio.create_task(tab.listen())
            try:
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.call(f"{domain}.enable")
                yield tab
            finally:
                listening.cancel()
                await asyncio.wait([listening])
        async with session.get(f"{address}/json/close/{target['id']}"):
            pass
