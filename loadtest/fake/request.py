"""A request's body as the fake server reads it. Pure. Fields it has no use for are accepted, whatever they hold."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec


class BodyInvalid(Exception):
    """The body can't be served; the answer is 400 with this sentence."""


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else " ".join(part.text for part in self.content or ())


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(msgspec.Struct):
    """The body of a request to either endpoint, chat or completions."""

    model: str
    messages: list[_Message] | None = None
    prompt: str | list[int | str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def tokens(self) -> Sequence[str | int]:
        """The prompt's tokens: ids as they are, and of text a token for every word."""
        if self.messages is not None:
            return [word for message in self.messages for word in message.text.split()]
        if isinstance(self.prompt, str):
            return self.prompt.split()
        return [] if self.prompt is None else self.prompt

    def digest(self) -> bytes:
        """16 bytes that stand for what an answer depends on: model, prompt and seed."""
        sum_ = blake2b(f"{self.model} {self.seed} ".encode(), digest_size=16)
        for message in self.messages or ():
            sum_.update(f"{message.role}\0{message.text}\0".encode())
        if isinstance(self.prompt, str):
            sum_.update(self.prompt.encode())
        elif self.prompt is not None:
            sum_.update(array("q", [token for token in self.prompt if isinstance(token, int)]).tobytes())
        return sum_.digest()


_decoder = msgspec.json.Decoder(Body)


def read_body(data: bytes, endpoint: str, refused_fields: Sequence[str] = ()) -> Body:
    """The body of a request to `endpoint` (chat or completions). Raises BodyInvalid."""
    try:
        body = _decoder.decode(data)
        named = msgspec.json.decode(data, type=dict[str, msgspec.Raw]) if refused_fields else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BodyInvalid(f"The body can't be read: {error}.") from None
    refused = [name for name in refused_fields if name in named]
    if refused:
        raise BodyInvalid(f"Unrecognized request argument supplied: {refused[0]}.")
    if (body.messages if endpoint == "chat" else body.prompt) is None:
        raise BodyInvalid(f"`{'messages' if endpoint == 'chat' else 'prompt'}` is missing.")
    if body.n not in (None, 1):
        raise BodyInvalid("The fake server gives one choice: `n` must be 1.")
    if any(limit is not None and limit < 1 for limit in (body.max_tokens, body.max_completion_tokens)):
        raise BodyInvalid("`max_tokens` must be at least 1.")
    return _one_prompt(body)


def _one_prompt(body: Body) -> Body:
    if isinstance(body.prompt, list) and body.prompt and isinstance(body.prompt[0], str):
        if len(body.prompt) > 1:
            raise BodyInvalid("The fake server takes one prompt a request.")
        body.prompt = body.prompt[0]
    return body
