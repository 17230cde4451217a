import math

import msgspec

from penstock.router.completions.logprobs import chat_logprobs, text_logprobs
from penstock.wire.frames import TokenLogprobs
from tests.unit.router.http_fakes import IM_END, TOKENIZER


def test_what_can_not_happen_is_a_number_json_can_hold() -> None:
    impossible = [TokenLogprobs(-math.inf, ((98, -math.inf),))]

    chat = chat_logprobs(TOKENIZER, [97], impossible)
    text = text_logprobs(TOKENIZER, [97], impossible, [0])

    assert (chat.content[0].logprob, chat.content[0].top_logprobs[0].logprob) == (-9999.0, -9999.0)
    assert (text.token_logprobs, text.top_logprobs) == ([-9999.0], [{"b": -9999.0, "a": -9999.0}])


def test_a_special_token_is_shown_by_name() -> None:
    (item,) = chat_logprobs(TOKENIZER, [IM_END], [TokenLogprobs(-1.0)]).content

    assert (item.token, bytes(item.bytes)) == ("<|im_end|>", b"<|im_end|>")


def test_pieces_of_characters_do_not_collide_in_the_legacy_format() -> None:
    logprobs = text_logprobs(TOKENIZER, [0xC3], [TokenLogprobs(-1.0, ((0xC3, -1.0), (0xE2, -2.0)))], [0])

    assert logprobs.top_logprobs == [{"bytes:\\xc3": -1.0, "bytes:\\xe2": -2.0}]
    assert msgspec.json.decode(msgspec.json.encode(logprobs)) == msgspec.to_builtins(logprobs)
