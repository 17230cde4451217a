"""Published prefixes as token ids of the demo model, from a real Redis."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.base.redis import connect
from penstock.base.redis_server import EmbeddedRedis, find_executable
from penstock.prefix import published
from penstock.router.models.published_prefixes import PublishedWatch, own_tokens
from penstock.text.source import resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import pack_token_ids

TEXT = "You are the assistant of a library. Answer briefly, in the reader's language, and name your source."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("demo"))


@pytest.fixture
def server(tmp_path: Path, socket_dir: Path) -> Iterator[EmbeddedRedis]:
    embedded = EmbeddedRedis(executable=find_executable(), data_dir=tmp_path, socket_dir=socket_dir)
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.mark.parametrize("question", ["Who wrote Emma?", "\n\n1. a", " x", "9", "", "\u00e9t\u00e9"])
def test_a_chat_with_that_system_message_begins_with_its_tokens(tokenizer: Tokenizer, question: str) -> None:
    plain, chat = own_tokens(tokenizer, TEXT)
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]

    assert tokenizer.encode_chat(messages)[: len(chat)] == chat
    assert tokenizer.encode(TEXT + question, add_special=True)[: len(plain) - 1] == plain[:-1]
    assert TEXT[-20:] in tokenizer.decode(chat)
    assert len(plain) > 15


def test_another_system_message_does_not(tokenizer: Tokenizer) -> None:
    _, chat = own_tokens(tokenizer, TEXT)
    other = tokenizer.encode_chat([{"role": "system", "content": TEXT[:-1] + "!"}, {"role": "user", "content": "a"}])

    assert other[: len(chat)] != chat


async def test_a_gateway_takes_over_what_is_published_and_withdrawn(
    server: EmbeddedRedis, tokenizer: Tokenizer
) -> None:
    found: list[Mapping[str, Sequence[bytes]]] = []
    async with connect(server.url) as client:
        watch = PublishedWatch(client, {"digest": tokenizer}, found.append)
        await watch.check()
        await published.publish(client, "library", TEXT, now=1.0)
        await watch.check()
        await watch.check()
        await published.withdraw(client, "library")
        await watch.check()

        assert found == [
            {"digest": []},
            {"digest": [pack_token_ids(token_ids) for token_ids in own_tokens(tokenizer, TEXT)]},
            {"digest": []},
        ]


async def test_while_redis_is_away_what_was_published_stays(server: EmbeddedRedis, tokenizer: Tokenizer) -> None:
    found: list[Mapping[str, Sequence[bytes]]] = []
    async with connect(server.url) as client:
        watch = PublishedWatch(client, {"digest": tokenizer}, found.append)
        await published.publish(client, "library", TEXT, now=1.0)
        await watch.check()
        await asyncio.to_thread(server.stop)
        await watch.check()

        assert len(found) == 1


async def test_what_can_not_be_read_changes_nothing_and_ends_nothing(
    server: EmbeddedRedis, tokenizer: Tokenizer
) -> None:
    found: list[Mapping[str, Sequence[bytes]]] = []
    async with connect(server.url) as client:
        watch = PublishedWatch(client, {"digest": tokenizer}, found.append)
        await published.publish(client, "library", TEXT, now=1.0)
        await watch.check()
        await client.hset("penstock:published:{all}:prefixes", "other", "no JSON")
        await client.incr("penstock:published:{all}:version")
        await watch.check()

        assert len(found) == 1


async def test_names_and_texts_are_bounded(server: EmbeddedRedis) -> None:
    async with connect(server.url) as client:
        for name, text in (("", "a"), ("n" * 65, "a"), ("n", ""), ("n", "a" * (published.MAX_CHARS + 1))):
            with pytest.raises(InvalidRequest):
                await published.publish(client, name, text, now=1.0)
        for number in range(published.MAX_PREFIXES):
            await published.publish(client, f"n{number}", "a", now=1.0)
        await published.publish(client, "n0", "b", now=2.0)
        with pytest.raises(InvalidRequest, match="withdraw one"):
            await published.publish(client, "more", "a", now=1.0)
        with pytest.raises(InvalidRequest, match="no prefix"):
            await published.withdraw(client, "more")

        snapshot = await published.read_published(client)
        assert snapshot is not None
        assert snapshot.prefixes[0] == published.Prefix("n0", "b", 2)
        assert await published.read_published(client, snapshot.version) is None
