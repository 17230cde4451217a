"""Tokens of a thinking model as pieces: any cutting into deltas gives the same thinking, content and count."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.completions.reasoning_assembly import AnswerReasoning, ReasoningAssembler
from penstock.router.completions.text_assembly import Shown, TextAssembler, TextPiece
from penstock.router.routing.request import TextDelta
from penstock.text.stops import StopAutomaton
from penstock.wire.frames import Delta, Finish, TokenLogprobs, pack_token_ids
from tests.unit.router.http_fakes import TEMPLATE, TOKENIZER, byte_tokenizer

QWEN3 = byte_tokenizer(template=TEMPLATE + "{# </think> #}")
FLIPPED = byte_tokenizer(flip=1, template=TEMPLATE + "{# </think> #}")
ANSWER = "<think>\nSo… a.\n</think>\n\nIt is é."
NUM_THOUGHT = len("<think>\nSo… a.\n</think>".encode())


def assembler(prompt: bytes = b"", stop: str | None = None) -> ReasoningAssembler:
    text = TextAssembler(
        QWEN3, StopAutomaton((stop,)) if stop else StopAutomaton(()), shown=Shown(reasoning_markers=True)
    )
    return ReasoningAssembler(text, AnswerReasoning(), QWEN3, pack_token_ids(list(prompt)))


def push(subject: ReasoningAssembler, pieces: list[bytes]) -> list[TextPiece]:
    last = len(pieces) - 1
    return [
        subject.push(
            Delta(
                1,
                list(data),
                Finish.STOP if number == last else None,
                logprobs=[TokenLogprobs(-float(byte), ()) for byte in data],
            )
        )
        for number, data in enumerate(pieces)
    ]


@given(cuts=st.lists(st.integers(0, len(ANSWER.encode())), max_size=10).map(sorted), stop=st.sampled_from([None, "zz"]))
def test_any_cutting_into_deltas_is_the_same_answer(cuts: list[int], stop: str | None) -> None:
    data = ANSWER.encode()
    bounds = [0, *cuts, len(data)]
    subject = assembler(stop=stop)

    pieces = push(subject, [data[begin:end] for begin, end in pairwise(bounds)])

    assert "".join(piece.reasoning for piece in pieces) == "So… a."
    assert "".join(piece.text for piece in pieces) == "It is é."
    assert [token_id for piece in pieces for token_id in piece.token_ids] == list(data)
    assert [entry.logprob for piece in pieces for entry in piece.logprobs or ()] == [-float(byte) for byte in data]
    assert subject.num_reasoning_tokens == NUM_THOUGHT
    assert pieces[-1].finish == "stop"


def test_it_is_plain_from_the_first_letter_of_the_content_on() -> None:
    subject = assembler()
    states = [
        (subject.push(Delta(1, list(data))), subject.is_plain)[1] for data in (b"<think>a", b"</think>", b"\n", b"b")
    ]

    assert states == [False, False, False, True]
    assert subject.text([*b"cd"]) == "cd"
    assert not assembler(stop="x").is_plain


def test_an_answer_without_thinking_is_plain_at_once() -> None:
    subject = assembler()

    assert subject.push(Delta(1, [*b"P"])).text == "P"
    assert (subject.is_plain, subject.num_reasoning_tokens) == (True, 0)


def test_a_stop_string_in_a_delta_ends_it_there() -> None:
    (piece,) = push(assembler(stop="a."), [ANSWER.encode()])

    assert (piece.reasoning, piece.text, piece.finish, piece.stop_string) == ("So…", "", "stop", "a.")
    assert bytes(piece.token_ids) == "<think>\nSo… a.".encode()


def test_the_prompts_last_tokens_say_where_it_begins() -> None:
    subject = assembler(b"x" * 1000 + b"<think>\n")

    (piece,) = push(subject, [b"a</think>b"])

    assert (piece.reasoning, piece.text) == ("a", "b")


def test_another_model_has_its_own_tokens_prompt_and_markers() -> None:
    data = bytes(byte ^ 1 for byte in b"a</think>b")

    subject = assembler().with_tokenizer(FLIPPED, pack_token_ids(byte ^ 1 for byte in b"<think>"))
    (piece,) = push(subject, [data])
    silent = assembler().with_tokenizer(TOKENIZER, pack_token_ids([*b"<think>"]))
    (shown,) = push(silent, [b"<think>a"])

    assert (piece.reasoning, piece.text) == ("a", "b")
    assert (shown.reasoning, shown.text, silent.num_reasoning_tokens) == ("", "<think>a", None)


def test_a_providers_answer_is_content() -> None:
    subject = assembler(b"<think>")

    piece = subject.push(TextDelta(1, [], Finish.STOP, text="Paris.", num_tokens=2))

    assert (piece.text, piece.reasoning, subject.num_reasoning_tokens) == ("Paris.", "", None)
