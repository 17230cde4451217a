"""Tokens of which made-up answers may consist, if their text is to tokenize back to the same ids: whole words behind a
space.

A tokenizer splits text into words before it looks at each, so such tokens stand for themselves behind one another.
Where one does not, there are none.
"""

import re
from collections.abc import Sequence

from penstock.base.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

MIN_WORDS = 256
"""Fewest words: with fewer, made-up answers would begin alike too often."""
_WORD = re.compile(rb" [a-z]+")


def find_word_ids(tokenizer: Tokenizer) -> Sequence[int]:
    """Ids of all tokens that are a space and small letters, in increasing order. Raises ConfigError for a vocabulary
    that has few of them, or whose tokenizer joins them."""
    ids = [index for index, data in enumerate(tokenizer.visible_bytes) if _WORD.fullmatch(data)]
    ids = [index for index in ids if tokenizer.encode(tokenizer.visible_bytes[index].decode(), False) == [index]]
    text = b"".join([tokenizer.visible_bytes[index] for index in ids]).decode()
    if len(ids) < MIN_WORDS or tokenizer.encode(text, False) != ids:
        raise ConfigError(
            "engine.timed.answers: words needs a tokenizer whose words stand for themselves behind one another; of this"
            f" one's {len(ids)} were tried"
        )
    return ids
