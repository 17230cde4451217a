"""A prompt that ends within its last message, for an answer that goes on with it.

Templates close every message. So the last one is rendered with a mark behind its text, and the prompt is cut there, as
transformers does it (`continue_final_message` of apply_chat_template).
"""

from collections.abc import Mapping, Sequence

from penstock.wire.errors import InvalidRequest

_SPACE = " "
"""The space behind the mark: a template that cuts the space around a message cuts this one too."""


def mark_end(messages: Sequence[Mapping[str, object]], mark: str) -> list[Mapping[str, object]]:
    """The messages with the mark behind the last one's text. mark: a character that is in none of them."""
    *others, last = messages
    return [*others, {**last, "content": f"{last['content']}{mark}{_SPACE}"}]


def cut_at_mark(text: str, mark: str) -> str:
    """The rendered conversation up to the mark; without the space at its end where the template cuts that. Raises
    InvalidRequest if the template left the last message out."""
    end = text.rfind(mark)
    if end < 0:
        raise InvalidRequest(
            "the model's chat template does not show the last message, so it can't be continued",
            param="continue_final_message",
        )
    cut = text[:end].replace(mark + _SPACE, "").replace(mark, "")
    return cut if text.startswith(_SPACE, end + len(mark)) else cut.rstrip()
