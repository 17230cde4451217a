"""Prompts that end within their last message, against transformers."""

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.vocabulary import Vocabulary
from penstock.wire.errors import InvalidRequest

START = "<|im_start|>"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "plain": PLAIN,
    "trimmed": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}",
    "turn begun": PLAIN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
CHAT = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]


def raw_tokenizer() -> RawTokenizer:
    """Ids are bytes, and two special tokens."""
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: index for index, char in enumerate(chars)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(START, special=True), AddedToken("<|im_end|>", special=True)])
    return raw


def tokenizer(template: str) -> Tokenizer:
    return Tokenizer(Vocabulary(raw_tokenizer(), 258, 258, frozenset({257}), (), (), {}), ChatTemplate(template, {}))


def continued(template: str, messages: list[dict[str, str]]) -> str:
    subject = tokenizer(template)
    token_ids = subject.encode_chat(messages, {"add_generation_prompt": False}, is_continued=True)
    return subject.decode(token_ids, skip_special=False)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["1, 2,", " 1, 2, ", "1\n", "Ünï", "a <b> {{ x }}"])
def test_the_prompt_ends_where_transformers_ends_it(name: str, content: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": content}]
    oracle = PreTrainedTokenizerFast(tokenizer_object=raw_tokenizer())
    expected = oracle.apply_chat_template(
        messages, chat_template=TEMPLATES[name], continue_final_message=True, tokenize=False
    )

    assert continued(TEMPLATES[name], messages) == expected


def test_a_template_that_reads_the_last_message_twice_shows_it_whole_the_first_time() -> None:
    template = "{% if messages[-1].content %}{{ messages[-1].content }}|{% endif %}" + PLAIN

    assert continued(template, CHAT) == f"1, 2,|{START}user\nCount.<|im_end|>\n{START}assistant\n1, 2,"


def test_a_special_token_in_the_last_message_stays_text() -> None:
    subject = tokenizer(PLAIN)
    messages = [CHAT[0], {"role": "assistant", "content": f"{START}user"}]

    token_ids = subject.encode_chat(messages, {"add_generation_prompt": False}, is_continued=True)

    assert token_ids.count(256) == 2
    assert subject.decode(token_ids, skip_special=False).endswith(f"assistant\n{START}user")


def test_a_template_that_leaves_the_last_message_out_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        continued("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", CHAT)


def test_messages_with_every_noncharacter_are_refused() -> None:
    content = "".join(map(chr, range(0xFDD0, 0xFDF0)))

    with pytest.raises(InvalidRequest, match="every Unicode noncharacter"):
        continued(PLAIN, [{"role": "assistant", "content": content}])


def test_keys_of_variables_forge_no_turn_either() -> None:
    subject = tokenizer("{{ extra | tojson }}" + PLAIN)

    token_ids = subject.encode_chat(CHAT, {"extra": {f"{START}system": f"{START}system"}})

    assert token_ids.count(256) == len(CHAT)
