"""Published prefixes as token ids of the models that are served: read from Redis, tokenized in a thread, handed on.

A text is looked for at the beginning of a plain prompt, and as the system message of a chat, through each model's own
template. Only the tokens that it makes whatever follows it are kept: where the next text would merge with its last
token, that token is left out. While Redis is away, what was published last stays so.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from penstock.prefix.published import Prefix, read_published
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import pack_token_ids

PERIOD_S = 2.0
"""Pause between two looks; so long a gateway may not yet share what another one shares."""
TIMEOUT_S = 2.0
FOLLOWING = ("a", "\n\nb", " c", "1")
"""Beginnings of what may follow a prefix; tokens that all of them leave alone are the prefix's own."""
_UNAVAILABLE = (RedisError, OSError, TimeoutError)

log = logging.getLogger("penstock.gateway")


class PublishedWatch:
    """Looks every period_s, for as long as `run` runs. tokenizers: by model digest. hand_on: takes the packed token ids
    of all prefixes by model digest, whenever they have changed."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        tokenizers: Mapping[str, Tokenizer],
        hand_on: Callable[[Mapping[str, Sequence[bytes]]], None],
        period_s: float = PERIOD_S,
    ) -> None:
        self._client = client
        self._tokenizers = dict(tokenizers)
        self._hand_on = hand_on
        self._period_s = period_s
        self._version: int | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)

    async def check(self) -> None:
        """Hand on what has changed."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                snapshot = await read_published(self._client, self._version)
        except _UNAVAILABLE:
            return
        except msgspec.MsgspecError as error:  # of a later version: what is known goes on
            log.error("prefixes_unreadable", extra={"error": type(error).__name__})
            return
        if snapshot is None:
            return
        self._hand_on(await asyncio.to_thread(self._tokenize, snapshot.prefixes))
        self._version = snapshot.version
        log.info("prefixes_published", extra={"names": [prefix.name for prefix in snapshot.prefixes]})

    def _tokenize(self, prefixes: Iterable[Prefix]) -> dict[str, list[bytes]]:
        return {
            digest: [
                pack_token_ids(token_ids) for prefix in prefixes for token_ids in own_tokens(tokenizer, prefix.text)
            ]
            for digest, tokenizer in self._tokenizers.items()
        }


def own_tokens(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The token ids that a prompt begins with if it begins with the text: of a plain prompt, and of a chat whose system
    message is the text, where the model has chats with such messages."""
    plain = [tokenizer.encode(text + following, add_special=True) for following in FOLLOWING]
    if not tokenizer.is_chat:
        return [_common(plain)]
    try:
        chats = [
            tokenizer.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": following}])
            for following in FOLLOWING
        ]
    except InvalidRequest:  # a template without system messages
        return [_common(plain)]
    return [_common(plain), _common(chats)]


def _common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all have."""
    found: list[int] = []
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        found.append(tokens[0])
    return found
