"""Words whose text tokenizes back."""

from random import Random

from penstock.text.source import resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.text.whole_words import MIN_WORDS, find_word_ids


def test_text_of_whole_words_tokenizes_back_alone_and_in_a_conversation() -> None:
    tokenizer, random = load_tokenizer(resolve("demo")), Random(0)
    ids = find_word_ids(tokenizer)

    assert len(ids) >= MIN_WORDS
    for _ in range(50):
        answer = random.choices(ids, k=40)
        text = tokenizer.decode(answer)
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": text}]
        asked = tokenizer.encode_chat(messages[:1])
        assert tokenizer.encode(text, False) == answer
        assert tokenizer.encode_chat(messages)[len(asked) : len(asked) + len(answer)] == answer
