"""Text to token ids, and the bytes of every token: the part of a tokenizer that the platform needs. Thread safe; no
weights, no network.

Special tokens are cut out here, not by the library, for two reasons. The control tokens of a chat template are
recognised while those that a user wrote into a message are plain text, so that a user can't forge a turn. And the text
between them is encoded piece by piece, as the library does itself.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RawTokenizer

from penstock.base.errors import ConfigError
from penstock.text import words
from penstock.text.continuation import cut_at_mark, mark_end
from penstock.text.draft import Cut, Draft, PieceEncoder, too_long
from penstock.text.json_parts import JsonParts
from penstock.text.reasoning import REASONING_MARKERS, ReasoningForm, ReasoningParserName, choose_reasoning
from penstock.text.seen import SeenScope
from penstock.text.source import ModelSource
from penstock.text.template import ChatTemplate
from penstock.text.token_bytes import bytes_of_tokens
from penstock.text.tools.forms import OWN_FORM, ToolForm, ToolParserName, choose_form
from penstock.text.tools.parser import MARKERS
from penstock.text.vocabulary import PRE_TOKENIZERS, Vocabulary, load_vocabulary
from penstock.wire.errors import InvalidRequest

_GUARDS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters: meant for internal use, never for interchange."""
_MAX_HELD_CHARS = 1024
"""Longest text that the library encodes while no other thread runs: a millisecond."""
_MAX_SHRINK = 4
"""How many characters of a text may become one by normalization, or go with a special token that takes the space around
it: canonical composition joins three at most."""
_NAME_BYTES = 8
_SEAM_TOKENS = 64
"""Tokens beyond a cut that are read too: how a text is split into tokens depends on what is before it, a word or so."""


class Tokenizer:
    """The tokenizer of one checkpoint. Build it with `load_tokenizer`.

    vocab_size: ids lie in [0, vocab_size). num_embedded: those that a model can read lie below it. token_bytes: bytes
    of every id, special tokens included. visible_bytes: the same with special tokens empty. marked_bytes: the same with
    markers of tool calls as text. marker_ids: ids of those that are special tokens. tool_form: how the model is told of
    tools. reasoning_form: how the model marks its thinking; None: it does not think. reasoning_ids: ids of the markers
    of thinking that are special tokens. eos_token_ids: what ends an answer, the chat's end of turn included.
    """

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate | None, tool_template: ChatTemplate | None = None
    ) -> None:
        """template: for conversations; None: it is no chat model. tool_template: with tools; None: the same one."""
        raw = vocabulary.raw
        raw.encode_special_tokens = True  # the library takes special tokens for text: they are cut out beforehand
        self._vocabulary = vocabulary
        self._template = template
        self._tool_template = tool_template or template
        added = raw.get_added_tokens_decoder()
        self.vocab_size = vocabulary.size
        self.num_embedded = vocabulary.num_embedded
        affixes = (*vocabulary.prefix_ids, *vocabulary.suffix_ids)
        self._largest_id = max((*raw.get_vocab(with_added_tokens=True).values(), *affixes), default=-1)
        self.eos_token_ids = vocabulary.eos_token_ids
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.token_bytes = bytes_of_tokens(raw, self.vocab_size)
        self.visible_bytes = [b"" if index in self.special_ids else data for index, data in enumerate(self.token_bytes)]
        self.marker_ids = {
            token.content: index
            for index, token in added.items()
            if token.special and token.content in MARKERS and index < self.vocab_size
        }
        self.marked_bytes = _with_bytes(self.visible_bytes, self.marker_ids)
        self.tool_form = self._choose_form("auto")
        self._added_ids = {token.content: index for index, token in added.items()}
        self.reasoning_ids = {
            text: index
            for text, index in self._added_ids.items()
            if text in REASONING_MARKERS and added[index].special and index < self.vocab_size
        }
        self._reasoning_bytes = _with_bytes(self.visible_bytes, self.reasoning_ids)
        self._all_marked_bytes = _with_bytes(self.marked_bytes, self.reasoning_ids)
        self.reasoning_form = self._choose_reasoning("auto")
        self._special = _pattern_of(token for token in added.values() if token.special)
        self._added = _pattern_of(added.values())
        self._max_token_chars = max(map(len, self.token_bytes), default=0) * (_MAX_SHRINK if _shrinks(raw) else 1)
        self._head, self._tail = raw, _without_first_prefix(raw)
        word_pattern = _word_pattern(raw)
        self._words = words.WordEncoder(word_pattern, lambda word: _ids_of(raw, word)) if word_pattern else None
        self._pieces = PieceEncoder(self._parts, os.urandom(_NAME_BYTES))
        self._json_parts: dict[int, JsonParts] = {}
        """Parts by the identity of their table, which is one of this tokenizer's."""

    @property
    def is_embedded(self) -> bool:
        """Whether a model can read whatever a text may become. False where a token's id lies beyond the embedding:
        there may be more ids than tokens, since files leave some out."""
        return self._largest_id < self.num_embedded

    @property
    def is_chat(self) -> bool:
        return self._template is not None

    @property
    def has_tool_template(self) -> bool:
        """Whether conversations with tools have a template of their own, which is for nothing else."""
        return self._tool_template is not self._template

    def with_tool_parser(self, parser: ToolParserName) -> "Tokenizer":
        """The same tokenizer with the form of tools that a pool is configured to have. Raises ConfigError where its
        template shows no tools, so that no model learns of that form."""
        if parser == "auto":
            return self
        if parser != "text" and (self._tool_template is None or not self._tool_template.renders_tools):
            raise ConfigError(
                f"tool_parser: {parser} is for a chat template that shows tools, and this model's shows none"
            )
        changed = copy(self)
        changed.tool_form = self._choose_form(parser)
        return changed

    def with_reasoning_parser(self, parser: ReasoningParserName) -> "Tokenizer":
        """The same tokenizer with the form of thinking that a pool is configured to have."""
        if parser == "auto":
            return self
        changed = copy(self)
        changed.reasoning_form = self._choose_reasoning(parser)
        return changed

    def shown_bytes(self, *, call_markers: bool, reasoning_markers: bool) -> list[bytes]:
        """Bytes of every id as they are in an answer's text: special tokens are empty, but for these markers."""
        if reasoning_markers:
            return self._all_marked_bytes if call_markers else self._reasoning_bytes
        return self.marked_bytes if call_markers else self.visible_bytes

    def json_parts(self, table: list[bytes]) -> JsonParts:
        """What each token adds to a JSON string. table: one of this tokenizer's own tables of bytes."""
        found = self._json_parts.get(id(table))
        if found is None:
            found = self._json_parts[id(table)] = JsonParts(table)
        return found

    def _choose_reasoning(self, parser: ReasoningParserName) -> ReasoningForm | None:
        return choose_reasoning(self._template.source if self._template else "", self._added_ids, parser)

    def _choose_form(self, parser: ToolParserName) -> ToolForm:
        template = self._tool_template
        return OWN_FORM if template is None else choose_form(template.source, template.renders_tools, parser)

    def encode(self, text: str, add_special: bool, max_tokens: int | None = None, cut: Cut | None = None) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised. add_special: with bos (and eos) as the checkpoint
        wants it. max_tokens: context of the model; None: no bound. cut: what to keep of a longer text, and then there
        is no bound either; special tokens are added to what is kept, and counted.

        Raises InvalidRequest for what is not Unicode text, and ContextTooLong as soon as there are more than
        `max_tokens`: how many more is not found out.
        """
        prefix, suffix = (self._vocabulary.prefix_ids, self._vocabulary.suffix_ids) if add_special else ((), ())
        if cut is not None:
            room = cut.num_tokens - len(prefix) - len(suffix)
            token_ids = self._draft(text, cut=cut._replace(num_tokens=room)).token_ids() if room > 0 else []
        else:
            self.check_chars(len(text), max_tokens)
            token_ids = self._draft(text, max_tokens=max_tokens).token_ids()
        return [*prefix, *token_ids, *suffix] if add_special else token_ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: Mapping[str, object] | None = None,
        max_tokens: int | None = None,
        *,
        is_continued: bool = False,
        cut: Cut | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins; see `draft_chat`."""
        return self.draft_chat(messages, options, max_tokens, is_continued=is_continued, cut=cut).token_ids()

    def draft_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: Mapping[str, object] | None = None,
        max_tokens: int | None = None,
        *,
        is_continued: bool = False,
        cut: Cut | None = None,
        seen: SeenScope | None = None,
    ) -> Draft:
        """A conversation up to where the assistant's answer begins, laid out by the template but not encoded.

        messages: as in OpenAI's API. options: further variables of the template, such as `tools` or `enable_thinking`.
        max_tokens: context of the model; None: no bound. A message is at least a token. is_continued: the prompt ends
        within the last message. cut: as in `encode`. seen: texts that were read before; None: none. Raises
        InvalidRequest when the model has no template or the template refuses, and ContextTooLong as `encode` does.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        bound = max_tokens if cut is None else None
        if bound is not None and len(messages) > bound:
            raise too_long(bound)
        mark = None
        if is_continued:
            mark = _unused_character(messages)
            messages = mark_end(messages, mark)
        try:
            guarded, guard = self._guard([messages, options or {}], bound)
        except RecursionError as error:
            raise InvalidRequest("the messages or tools are nested too deeply", param="messages") from error
        template = self._tool_template if options and "tools" in options and self._tool_template else self._template
        text = template.render(guarded[0], guarded[1])
        if mark is not None:
            text = cut_at_mark(text, mark)
        if cut is None:
            self.check_chars(len(text), bound)
        return self._draft(text, guard, bound, cut, seen)

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole answer; bytes that are not UTF-8 become U+FFFD."""
        table = self.visible_bytes if skip_special else self.token_bytes
        return b"".join([table[index] for index in token_ids]).decode("utf-8", "replace")

    def spell(self, token_ids: Iterable[int]) -> list[str]:
        """The tokens as the vocabulary spells them, which is not their text: `\u0120the` for ` the`, say. Empty for an
        id that has none."""
        return [self._vocabulary.raw.id_to_token(token_id) or "" for token_id in token_ids]

    def check_chars(self, num_chars: int, max_tokens: int | None) -> None:
        """Raises ContextTooLong if so many characters are more than `max_tokens` tokens whatever they are. None: there
        is no bound."""
        if max_tokens is not None and num_chars > max_tokens * self._max_token_chars:
            raise too_long(max_tokens)

    def _draft(
        self,
        text: str,
        guard: str | None = None,
        max_tokens: int | None = None,
        cut: Cut | None = None,
        seen: SeenScope | None = None,
    ) -> Draft:
        """A text in pieces; where it is cut, no more of it than the tokens that are kept can be of. guard: a character
        to remove again, which keeps what a user wrote from being a special token."""
        if cut is not None:
            chars_per_token = self._max_token_chars * (1 if guard is None else 2)  # a guard is between two characters
            num_chars = (cut.num_tokens + _SEAM_TOKENS) * chars_per_token
            text = text[-num_chars:] if cut.keeps_end else text[:num_chars]
        draft = Draft(self._pieces, max_tokens, cut, seen)
        at = 0
        for match in self._added.finditer(text) if self._added else ():
            draft.add_text(_unguarded(text[at : match.start()], guard), at == 0)
            draft.add_token(self._id_of(match.group()))
            at = match.end()
        draft.add_text(_unguarded(text[at:], guard), at == 0)
        return draft

    def _id_of(self, found: str) -> int:
        """Id of an added token as it stands in a text: some include the space around them."""
        return self._added_ids[found if found in self._added_ids else found.strip()]

    def _parts(self, piece: str, is_first: bool) -> Iterable[list[int]]:
        if self._words is None:
            return (_ids_of(self._head if is_first else self._tail, piece),)
        if len(piece) <= words.PART_CHARS:
            return (self._words.encode(piece),)
        return self._words.encode_parts(piece)

    def _guard(self, value: list[object], max_tokens: int | None) -> tuple[list[object], str | None]:
        """`value` with every special token in its strings broken by a character that occurs nowhere in it, and that
        character. Raises ContextTooLong as `check_chars` does, before the strings are looked at."""
        texts = list(_strings(value))
        self.check_chars(sum(map(len, texts)), max_tokens)
        if self._special is None or not any(self._special.search(text) for text in texts):
            return value, None
        guard = next((char for char in _GUARDS if not any(char in text for text in texts)), None)
        if guard is None:
            raise InvalidRequest(
                "the messages hold both special tokens and every Unicode noncharacter", param="messages"
            )
        return [_replace(item, self._special, guard) for item in value], guard


def _unguarded(text: str, guard: str | None) -> str:
    return text if guard is None else text.replace(guard, "")


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises ConfigError when it is missing or of a kind that is not supported."""
    vocabulary = load_vocabulary(source)
    template, tool_template = (
        ChatTemplate(text, vocabulary.special_tokens) if text is not None else None
        for text in (source.chat_template, source.tool_template)
    )
    return Tokenizer(vocabulary, template, tool_template)


def _ids_of(raw: RawTokenizer, text: str) -> list[int]:
    """Token ids of a text, without special tokens added. Raises InvalidRequest for half a surrogate pair, which JSON
    can spell and Unicode text can't hold."""
    try:
        # of the two, the second one lets other threads run meanwhile, and begins threads of its own
        encoded = (
            raw.encode(text, add_special_tokens=False)
            if len(text) <= _MAX_HELD_CHARS
            else raw.encode_batch_fast([text], add_special_tokens=False)[0]
        )
        token_ids: list[int] = encoded.ids
    except TypeError as error:
        raise InvalidRequest("the text holds half of a surrogate pair, which is not valid Unicode") from error
    return token_ids


def _shrinks(raw: RawTokenizer) -> bool:
    """Whether a text's tokens may have fewer bytes together than the text."""
    return raw.normalizer is not None or any(
        token.lstrip or token.rstrip for token in raw.get_added_tokens_decoder().values()
    )


def _pattern_of(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """A pattern that finds any of these tokens in a text, the longest first. Returns None if there are none."""
    branches = [
        (r"\s*" if token.lstrip else "")
        + (rf"(?<!\w){re.escape(token.content)}(?!\w)" if token.single_word else re.escape(token.content))
        + (r"\s*" if token.rstrip else "")
        for token in sorted(tokens, key=lambda token: len(token.content), reverse=True)
    ]
    return re.compile("|".join(branches)) if branches else None


def _without_first_prefix(raw: RawTokenizer) -> RawTokenizer:
    """The tokenizer for text that does not begin the input: some put a space before the first word only."""
    if b'"prepend_scheme":"first"' not in _state(raw.pre_tokenizer):
        return raw
    tail: RawTokenizer = RawTokenizer.from_str(
        raw.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    )
    tail.encode_special_tokens = True
    return tail


def _word_pattern(raw: RawTokenizer) -> re.Pattern[str] | None:
    """The twin of this tokenizer's pre-tokenizer, where there is one."""
    if _kind(raw.normalizer) not in (None, "NFC"):
        return None
    wanted = _shape(raw.pre_tokenizer)
    twins = {"smollm": words.SMOLLM, "gpt-2": words.GPT2, "llama3": words.LLAMA3, "qwen2": words.QWEN2}
    for name, pattern in twins.items():
        probe = RawTokenizer(models.BPE())
        PRE_TOKENIZERS[name](probe)
        if _shape(probe.pre_tokenizer) == wanted:
            return pattern
    return None


def _with_bytes(table: list[bytes], tokens: Mapping[str, int]) -> list[bytes]:
    """A table of bytes by id in which these tokens are their text; the table itself, if there are none."""
    if not tokens:
        return table
    changed = list(table)
    for text, index in tokens.items():
        changed[index] = text.encode()
    return changed


def _state(part: object) -> bytes:
    """The library's JSON for one of its components."""
    return bytes(part.__getstate__()) if part is not None else b"null"  # type: ignore[call-overload]


def _kind(part: object) -> str | None:
    state = json.loads(_state(part))
    return state["type"] if state else None


def _shape(part: object) -> object:
    """A component's settings without those that only concern offsets."""
    return json.loads(
        _state(part), object_hook=lambda item: {key: value for key, value in item.items() if key != "trim_offsets"}
    )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield key
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _unused_character(messages: Sequence[Mapping[str, object]]) -> str:
    """A noncharacter that no message has, other than the one that `_guard` takes."""
    texts = list(_strings(messages))
    unused = [char for char in _GUARDS if not any(char in text for text in texts)]
    if len(unused) < 2:
        raise InvalidRequest("the messages hold every Unicode noncharacter", param="messages")
    return unused[-1]


def _replace(value: object, special: re.Pattern[str], guard: str) -> object:
    """A copy of JSON-like data in which every match of `special` is interspersed with `guard`, in keys too."""
    if isinstance(value, str):
        return special.sub(lambda match: guard.join(match.group()), value)
    if isinstance(value, Mapping):
        return {_replace(key, special, guard): _replace(item, special, guard) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_replace(item, special, guard) for item in value]
    return value
