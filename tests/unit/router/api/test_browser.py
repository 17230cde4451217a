"""The gateway's pages in a real browser: headless Chromium, over a socket."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.router.api.openapi import document
from penstock.router.models.served_model import ServedModel
from penstock.wire.errors import ReplicaLost
from penstock.wire.frames import Finish
from tests.browser import Tab, find_chromium, open_tab, running_chromium
from tests.unit.router.completions.test_reasoning_requests import ANSWER, SAID, THOUGHT, served
from tests.unit.router.http_fakes import KEY, MODEL, Script, World, listening, running_gateway

pytestmark = [pytest.mark.timeout(180)]

ENTER, ESCAPE = 13, 27
WRONG_KEY = "sk-penstock-" + "f" * 48
COLOURS = """(() => {
  const style = getComputedStyle(document.body);
  return [style.color, style.backgroundColor].map(text => text.match(/\\d+/g).slice(0, 3).map(Number));
})()"""
RED_HERRING = "<b>bold</b><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here: Debian's package chromium, or PENSTOCK_TEST_CHROMIUM")
    with running_chromium(program, tmp_path_factory.mktemp("chromium") / "profile") as address:
        yield address


@asynccontextmanager
async def opened(
    browser: str, path: str, script: Script | None = None, model: ServedModel | None = None
) -> AsyncIterator[tuple[Tab, World, str]]:
    """A tab that shows the page, the gateway behind it, and the gateway's URL."""
    async with running_gateway(script, model=model) as world, listening(world.app) as url, open_tab(browser) as tab:
        await tab.open(url + path)
        yield tab, world, url


async def show_key(tab: Tab, key: str = KEY) -> None:
    await tab.type("key", key)
    await tab.press("Enter", ENTER)
    await tab.until("!document.getElementById('models').hidden || !document.getElementById('key-error').hidden")


async def ask(tab: Tab, message: str = "Capital of France?") -> None:
    await tab.type("model", MODEL)
    await tab.type("message", message)
    await tab.press("Enter", ENTER, is_ctrl=True)


def luminance(colour: list[int]) -> float:
    """Relative luminance of a colour (WCAG 2.2)."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


async def test_the_description_shows_every_operation_and_schema(browser: str) -> None:
    described: dict[str, Any] = document()
    operations = {
        f"operation-{operation['operationId']}": f"{method.upper()} {path}"
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if method != "parameters"
    }
    schemas = {f"schema-{name}": name for name in described["components"]["schemas"]}
    async with opened(browser, "/docs") as (tab, _, url):
        await tab.until("document.querySelectorAll('#schema-list .entry').length > 0")
        shown = await tab.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.entry')]"
            ".map(e => [e.id, e.querySelector('h3').textContent]))"
        )
        dangling = await tab.evaluate(
            "[...document.querySelectorAll('main a')].map(a => a.hash.slice(1))"
            ".filter(id => id && !document.getElementById(id))"
        )
        fields = await tab.evaluate("document.querySelectorAll('#schema-ChatRequest tbody tr').length")

        assert shown == operations | schemas
        assert dangling == []
        assert fields == len(described["components"]["schemas"]["ChatRequest"]["properties"])
        assert tab.errors == []
        assert {address.startswith(f"{url}/") for address in tab.requested} == {True}


async def test_the_descriptions_search_leaves_what_has_all_words(browser: str) -> None:
    async with opened(browser, "/docs") as (tab, _, _url):
        await tab.until("document.querySelectorAll('#schema-list .entry').length > 0")
        await tab.type("filter", "detokenize text")
        await tab.until("document.getElementById('found').textContent")
        shown = await tab.evaluate("[...document.querySelectorAll('.entry')].filter(e => !e.hidden).map(e => e.id)")

        assert "operation-detokenize" in shown
        assert "operation-listModels" not in shown


async def test_a_link_to_a_schema_opens_it(browser: str) -> None:
    async with opened(browser, "/docs#schema-Model") as (tab, _, _url):
        await tab.until("document.getElementById('schema-Model')?.open")

        assert await tab.evaluate("document.querySelectorAll('.entry[open]').length") == 1


async def test_without_a_key_the_overview_says_version_and_readiness_alone(browser: str) -> None:
    async with opened(browser, "/") as (tab, _, url):
        await tab.until("document.getElementById('state').textContent === 'ready'")

        assert await tab.text("version") == document()["info"]["version"]
        assert await tab.text("base-url") == f"{url}/v1"
        assert await tab.evaluate("document.getElementById('models').hidden")
        assert MODEL not in (await tab.evaluate("document.body.innerText")).split()
        assert {address.removeprefix(url) for address in tab.requested} >= {"/", "/version", "/readyz"}
        assert not [address for address in tab.requested if "/v1" in address]
        assert tab.errors == []


async def test_with_a_key_the_models_are_listed_and_an_answer_streams(browser: str) -> None:
    async with opened(browser, "/", Script("Paris.", hold_after=3)) as (tab, world, url):
        await show_key(tab)
        await tab.until("!document.getElementById('models').hidden")
        row = await tab.evaluate("[...document.querySelectorAll('#model-rows td')].map(cell => cell.textContent)")
        assert row == [MODEL, "2", "512"]

        await ask(tab)
        await tab.until("document.querySelector('.assistant .text')?.textContent === 'Par'")
        (stream,) = world.dispatcher.streams
        assert await tab.evaluate("document.getElementById('send').disabled")
        assert "ms" in await tab.text("ttft")
        stream.resume()
        await tab.until("document.getElementById('progress').textContent.includes('complete')")

        answer = await tab.evaluate("document.querySelector('.assistant .text').textContent")
        figures = [await tab.text(name) for name in ("completion-tokens", "cached-tokens", "finish")]
        assert (answer, figures) == ("Paris.", ["6", "16", "stop"])
        assert int(await tab.text("prompt-tokens")) > 16
        assert len(await tab.text("request-id")) == 24
        assert tab.errors == []
        kept = await tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [0, 0, ""], "the key is kept in memory alone"
        assert {address.startswith(f"{url}/") for address in tab.requested} == {True}
        assert not [address for address in tab.requested if KEY in address]


async def test_a_conversation_goes_on_with_what_was_said(browser: str) -> None:
    async with opened(browser, "/", Script("Paris.")) as (tab, world, _url):
        await show_key(tab)
        for turn in (1, 2):
            await ask(tab)
            await tab.until(f"document.querySelectorAll('.assistant').length === {turn}")
            await tab.until("document.getElementById('send').disabled === false")

        first, second = (generation.num_prompt_tokens for generation in world.dispatcher.generations)
        assert second > first + len("Paris.")


async def test_what_a_model_thinks_is_shown_apart_from_its_answer(browser: str) -> None:
    held = len(ANSWER.split("user")[0])
    async with opened(browser, "/", Script(ANSWER, hold_after=held), served()) as (tab, world, _url):
        await show_key(tab)
        await ask(tab)
        await tab.until("document.querySelector('.thinking span')?.textContent === 'The'")
        (stream,) = world.dispatcher.streams
        assert "ms" in await tab.text("ttft")
        stream.resume()
        await tab.until("document.getElementById('progress').textContent.includes('complete')")

        assert await tab.evaluate("document.querySelector('.thinking span').textContent") == THOUGHT
        assert await tab.evaluate("document.querySelector('.assistant .text').textContent") == SAID
        assert await tab.text("completion-tokens") == str(len(ANSWER.encode()))
        assert tab.errors == []


async def test_an_answer_that_ended_while_the_model_thought_stays(browser: str) -> None:
    script = Script(ANSWER.split("Paris")[0], finish=Finish.LENGTH)
    async with opened(browser, "/", script, served()) as (tab, world, _url):
        await show_key(tab)
        for turn in (1, 2):
            await ask(tab)
            await tab.until(f"document.querySelectorAll('.assistant .thinking').length === {turn}")
            await tab.until("document.getElementById('send').disabled === false")

        assert await tab.text("finish") == "length"
        assert await tab.evaluate("document.querySelectorAll('.turn').length") == 4
        assert len(world.dispatcher.generations) == 2


async def test_a_wrong_key_is_answered_as_the_api_says_it(browser: str) -> None:
    async with opened(browser, "/") as (tab, world, _url):
        await show_key(tab, WRONG_KEY)
        await tab.until("!document.getElementById('key-error').hidden")
        await ask(tab, "Keep this")
        await tab.until("!document.getElementById('error').hidden")

        said = (await world.client.get("/v1/status", headers={"authorization": f"Bearer {WRONG_KEY}"})).json()
        for element in ("key-error", "error"):
            text = await tab.text(element)
            assert text.startswith(f"401 {said['error']['code']}: {said['error']['message']}")
        assert await tab.evaluate("document.querySelectorAll('.turn').length") == 0
        assert await tab.evaluate("document.getElementById('message').value") == "Keep this"
        assert not world.dispatcher.generations


async def test_an_error_within_a_stream_is_shown_beside_what_came(browser: str) -> None:
    script = Script("Pari", error=ReplicaLost("The replica was lost."))
    async with opened(browser, "/", script) as (tab, _, _url):
        await show_key(tab)
        await ask(tab)
        await tab.until("!document.getElementById('error').hidden")

        assert "The replica was lost." in await tab.text("error")
        assert await tab.evaluate("document.querySelector('.assistant .text').textContent") == "Pari"


@pytest.mark.parametrize("way", ["button", "Escape"])
async def test_stop_ends_the_answer_at_the_gateway_and_keeps_what_came(browser: str, way: str) -> None:
    async with opened(browser, "/", Script("Paris.", hold_after=3)) as (tab, world, _url):
        await show_key(tab)
        await ask(tab)
        await tab.until("document.querySelector('.assistant .text')?.textContent === 'Par'")
        if way == "button":
            await tab.click("stop")
        else:
            await tab.press("Escape", ESCAPE)
        await tab.until("document.getElementById('progress').textContent.startsWith('Stopped')")
        await world.dispatcher.until(lambda: world.dispatcher.num_open == 0)

        assert await tab.evaluate("document.querySelector('.assistant .text').textContent") == "Par"
        assert await tab.text("finish") == "stopped"
        assert not await tab.evaluate("document.getElementById('send').disabled")


async def test_an_answer_is_text_whatever_it_says(browser: str) -> None:
    async with opened(browser, "/", Script(RED_HERRING)) as (tab, _, _url):
        await show_key(tab)
        await ask(tab)
        await tab.until("document.getElementById('progress').textContent.includes('complete')")

        assert await tab.evaluate("document.querySelector('.assistant .text').textContent") == RED_HERRING
        assert await tab.evaluate("document.querySelector('.assistant .text').children.length") == 0


async def test_a_key_is_kept_in_the_tab_only_where_the_reader_says_so(browser: str) -> None:
    async with opened(browser, "/") as (tab, _, url):
        await tab.click("keep")
        await show_key(tab)
        await tab.until("!document.getElementById('models').hidden")
        await tab.open(f"{url}/?again")
        await tab.until("!document.getElementById('models').hidden")
        async with open_tab(browser) as other:
            await other.open(f"{url}/")
            assert await other.evaluate("document.getElementById('key').value") == ""
        await tab.click("keep")

        assert await tab.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_nothing_sticks_out_at_360_pixels(browser: str, path: str) -> None:
    async with opened(browser, path) as (tab, _, _url):
        await tab.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
        if path == "/":
            await show_key(tab)
            await tab.until("!document.getElementById('models').hidden")
        else:
            await tab.until("document.querySelectorAll('#schema-list .entry').length > 0")
            await tab.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")

        assert await tab.evaluate("innerWidth") == 360
        assert await tab.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_both_colour_schemes_are_readable_and_differ(browser: str, path: str) -> None:
    async with opened(browser, path) as (tab, _, _url):
        grounds = []
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=media)
            ink, ground = map(luminance, await tab.evaluate(COLOURS))
            grounds.append(ground)

            assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 7, scheme
        assert grounds[0] > 0.8 > 0.1 > grounds[1]


async def test_every_control_has_a_name_and_is_reached_by_keyboard(browser: str) -> None:
    async with opened(browser, "/") as (tab, _, _url):
        controls = await tab.evaluate(
            "[...document.querySelectorAll('input, textarea, button')].map(e =>"
            " [e.id || e.textContent, e.tabIndex, e.labels?.length || e.textContent.length])"
        )

        assert len(controls) > 9
        assert not [control for control in controls if control[1] < 0 or not control[2]], json.dumps(controls)
