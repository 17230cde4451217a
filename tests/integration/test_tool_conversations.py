"""Sixty conversations with tools through the whole platform, on the demo model: fifteen tool sets by the unmodified
clients of OpenAI and Anthropic, whole and streamed.

Each is a demanded call, an answer to its result, and a second demanded call. The demo model is small: what is
demanded, a grammar enforces. In exact mode, for the batches differ, and an answer that goes on elsewhere is computed
again.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import product
from typing import NamedTuple

import anthropic
import jsonschema
import openai
import pytest

from bench.support.platform_process import PlatformProcess, running_platform
from tests.integration.replica_processes import kill_replica
from tests.integration.sizes import full
from tests.integration.tool_clients import Answer, AnthropicClient, Client, OnPart, OpenAIClient, Wish
from tests.integration.tool_sets import TOOL_SETS, Demand, ToolSet
from tests.integration.waiting import wait_for

pytestmark = [pytest.mark.platform, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], replicas: 2, \
engine: {{exact: true, threads: 1, max_num_seqs: 16}}}}
"""
AT_ONCE = 16
"""Conversations."""
CLIENTS = ("openai", "anthropic")
FORMS = ("whole", "streamed")
KILLED = {"openai": "nested object", "anthropic": "array of objects"}
"""Tool sets of the conversations in which a replica is killed, by client."""
SETS = {
    each.name: each
    for number, each in enumerate(TOOL_SETS, start=1)
    if number % full(1, 3) == 0 or each.name in KILLED.values()
}
KILLED_AFTER = 4
"""Parts of arguments."""
RECOVERY_S = 60.0


class Key(NamedTuple):
    tool_set: str
    client: str
    form: str


KEYS = [Key(name, client, form) for client, form, name in product(CLIENTS, FORMS, SETS)]
"""All conversations, ordered so that a tool set comes again when its prompts are cached."""


class Conversation(NamedTuple):
    first: Answer
    """The demanded call."""
    second: Answer
    """Text behind its result."""
    third: Answer
    """Another demanded call."""
    other: Answer | None
    """Text behind another result of the first call, which is longer; only of conversations that are not streamed."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def clients(platform: PlatformProcess) -> Iterator[Mapping[str, Client]]:
    with ExitStack() as stack:
        chat = stack.enter_context(
            openai.OpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0, timeout=120)
        )
        claude = stack.enter_context(
            anthropic.Anthropic(base_url=platform.url, api_key=platform.key, max_retries=0, timeout=120)
        )
        yield {"openai": OpenAIClient(chat), "anthropic": AnthropicClient(claude)}


@pytest.fixture(scope="module")
def held(clients: Mapping[str, Client]) -> Mapping[Key, "Future[Conversation]"]:
    """All of them, over when the first test begins."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {key: pool.submit(hold, clients[key.client], key) for key in KEYS}
        wait(found.values())
    return found


def ignore(replica: str) -> None:
    """What is done behind a part of a call where nothing is to happen."""


def hold(client: Client, key: Key, on_part: OnPart = ignore) -> Conversation:
    tools = SETS[key.tool_set]
    seed = list(SETS).index(key.tool_set)

    def ask(messages: list[object], wish: Wish) -> Answer:
        return client.whole(messages, wish) if key.form == "whole" else client.streamed(messages, wish, on_part)

    question = client.asked(tools.first.question)
    first = ask(question, demanded(tools, tools.first, seed))
    text = Wish(tools.functions, has_call=False)
    messages = [*question, *client.told(first, tools.result)]
    second = ask(messages, text)
    messages += [*client.told(second, ""), *client.asked(tools.second.question)]
    third = ask(messages, demanded(tools, tools.second, seed))
    other = ask([*question, *client.told(first, tools.other_result)], text) if key.form == "whole" else None
    return Conversation(first, second, third, other)


def turns(talk: Conversation) -> tuple[Answer, Answer, Answer]:
    return talk.first, talk.second, talk.third


def demanded(tools: ToolSet, demand: Demand, seed: int) -> Wish:
    return Wish(tools.functions, True, demand.name, tools.is_parallel, seed)


def check(answer: Answer, tools: ToolSet, demand: Demand) -> None:
    """Raises unless the answer is calls as demanded, with arguments that their schemas accept."""
    assert answer.calls
    assert (answer.text, answer.finish) == ("", "tool_calls")
    assert len(answer.calls) == len(set(answer.call_ids))
    assert tools.is_parallel or len(answer.calls) == 1
    for call in answer.calls:
        assert demand.name in (None, call.name)
        jsonschema.validate(json.loads(call.arguments), tools.schema(call.name))


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_calls_parse_validate_and_their_results_are_used(held: Mapping[Key, "Future[Conversation]"], key: Key) -> None:
    talk, tools = held[key].result(), SETS[key.tool_set]

    check(talk.first, tools, tools.first)
    check(talk.third, tools, tools.second)
    assert talk.second.text
    assert not talk.second.calls
    assert talk.first.prompt_tokens < talk.third.prompt_tokens
    # two results, two prompts, two answers
    other = held[key._replace(form="whole")].result().other
    assert other is not None
    assert talk.second.prompt_tokens < other.prompt_tokens
    assert talk.second.text != other.text


@pytest.mark.parametrize("name", SETS)
def test_a_conversation_is_the_same_by_both_clients_whole_and_streamed(
    held: Mapping[Key, "Future[Conversation]"], name: str
) -> None:
    talks = [held[Key(name, client, form)].result() for client, form in product(CLIENTS, FORMS)]

    said = [[answer.said for answer in turns(talk)] for talk in talks]
    assert said == said[:1] * len(said)
    whole, streamed = ([answer.calls for answer in turns(talk)] for talk in talks[: len(FORMS)])  # by openai's client
    assert whole == streamed  # as text, too


@pytest.mark.parametrize(("client", "name"), KILLED.items())
def test_a_conversation_is_the_same_after_its_replica_was_killed_in_mid_call(
    platform: PlatformProcess,
    clients: Mapping[str, Client],
    held: Mapping[Key, "Future[Conversation]"],
    client: str,
    name: str,
) -> None:
    key = Key(name, client, "streamed")
    wait_for(lambda: platform.metric("penstock_replicas") == 2, within_s=RECOVERY_S)
    resumed = platform.metric("penstock_route_attempts_total", reason="resume")
    parts: list[str] = []

    def kill_once(replica: str) -> None:
        parts.append(replica)
        if len(parts) == KILLED_AFTER:
            kill_replica(platform, replica)

    talk = hold(clients[client], key, kill_once)

    assert platform.metric("penstock_route_attempts_total", reason="resume") == resumed + 1
    assert [answer.said for answer in turns(talk)] == [answer.said for answer in turns(held[key].result())]


def test_the_counts_are_reported(
    held: Mapping[Key, "Future[Conversation]"], capsys: pytest.CaptureFixture[str]
) -> None:
    talks = {key: future.result() for key, future in held.items()}
    calls = [call for talk in talks.values() for answer in (talk.first, talk.third) for call in answer.calls]
    quoted = sum(SETS[key.tool_set].result.lower() in talk.second.text.lower() for key, talk in talks.items())
    several = sum(len(talk.first.calls) > 1 or len(talk.third.calls) > 1 for talk in talks.values())
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(talks)} conversations, {len(calls)} calls; {several} conversations with several calls in an "
            f"answer, {quoted} whose answer quotes the result word for word\n"
        )

    assert len(TOOL_SETS) == 15
    assert len(talks) == 4 * len(SETS)
    assert several
