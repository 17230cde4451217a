"""Answers of requests with tools: content, calls, their ids, and how the answer ends."""

from typing import Any

import pytest

from penstock.router.completions.text_assembly import Shown, TextAssembler, TextPiece
from penstock.router.completions.tool_assembly import AnswerTools, ToolAssembler
from penstock.router.routing.request import CallDelta, TextDelta
from penstock.text.stops import NO_STOPS, StopAutomaton
from penstock.text.tools.forms import OWN_FORM, ToolForm
from penstock.wire.frames import Delta, Finish
from tests.unit.router.http_fakes import IM_END, OTHER_TOKENIZER, TOKENIZER

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def assembler(
    *, is_stream: bool = True, is_parallel: bool = True, form: ToolForm = OWN_FORM, seed: int = 1, stops: Any = NO_STOPS
) -> ToolAssembler:
    tools = AnswerTools(frozenset({"f"}), is_parallel, is_stream)
    return ToolAssembler(TextAssembler(TOKENIZER, stops, shown=Shown(call_markers=True)), tools, form, seed)


def pushed(subject: ToolAssembler, answer: str, finish: Finish = Finish.STOP, size: int = 1) -> list[TextPiece]:
    data = [*answer.encode(), IM_END]
    return [
        subject.push(Delta(1, data[at : at + size], finish if at + size >= len(data) else None))
        for at in range(0, len(data), size)
    ]


def text(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def calls(pieces: list[TextPiece]) -> list[tuple[str, str]]:
    found: list[list[str]] = []
    for piece in pieces:
        for call in piece.calls:
            if call.name is not None:
                assert call.number == len(found)
                assert call.id is not None
                found.append([call.name, ""])
            found[call.number][1] += call.arguments
    return [(name, arguments) for name, arguments in found]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_its_content_its_calls_and_all_its_tokens(is_stream: bool, size: int) -> None:
    answer = f"Let me see.\n\n{CALL}\n{CALL}"

    pieces = pushed(assembler(is_stream=is_stream), answer, size=size)

    assert (text(pieces), calls(pieces)) == ("Let me see.", [("f", '{"a": 1}')] * 2)
    assert [token for piece in pieces for token in piece.token_ids] == [*answer.encode(), IM_END]
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]


def test_an_answer_without_calls_is_what_it_would_be_without_tools() -> None:
    pieces = pushed(assembler(), "Hé <tool_ !  ")

    assert (text(pieces), calls(pieces), pieces[-1].finish) == ("Hé <tool_ !  ", [], "stop")


def test_an_answer_that_is_cut_off_says_so() -> None:
    half = pushed(assembler(), CALL[:-16], Finish.LENGTH)
    held = pushed(assembler(is_stream=False), CALL[:-16], Finish.LENGTH)
    whole = pushed(assembler(), CALL, Finish.LENGTH)

    assert [pieces[-1].finish for pieces in (half, held, whole)] == ["length"] * 3
    assert (text(held), calls(held)) == (CALL[:-16], [])
    assert calls(half)[0][0] == "f"


def test_ids_differ_within_an_answer_and_between_answers() -> None:
    first, second = (
        [call.id for piece in pushed(assembler(seed=seed), CALL + CALL) for call in piece.calls if call.id]
        for seed in (1, 2)
    )

    assert len({*first, *second}) == 4
    assert all(call_id.startswith("call_") for call_id in first)


def test_mistrals_ids_are_such_as_its_template_accepts() -> None:
    form = ToolForm("mistral", is_in_template=True)
    pieces = pushed(assembler(form=form), '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    (call_id,) = [call.id for piece in pieces for call in piece.calls if call.id]

    assert len(call_id) == 9
    assert call_id.isalnum()


def test_where_parallel_calls_are_refused_the_first_one_counts() -> None:
    pieces = pushed(assembler(is_parallel=False), CALL + CALL)

    assert calls(pieces) == [("f", '{"a": 1}')]
    assert pieces[-1].finish == "tool_calls"


def test_a_stop_string_ends_the_text_before_it_is_read() -> None:
    pieces = pushed(assembler(stops=StopAutomaton(("</tool_call>",))), CALL, size=1000)

    assert (text(pieces), calls(pieces), pieces[-1].finish) == ("", [("f", '{"a": 1}')], "tool_calls")


def test_an_answer_by_another_model_is_read_in_its_tokens_and_form() -> None:
    subject = assembler(form=ToolForm("mistral", is_in_template=True)).with_tokenizer(OTHER_TOKENIZER)

    piece = subject.push(Delta(1, [byte ^ 1 for byte in CALL.encode()], Finish.STOP))

    assert (piece.text, calls([piece])) == ("", [("f", '{"a": 1}')])


def test_what_a_provider_has_found_is_passed_on_and_its_text_is_not_read_again() -> None:
    subject = assembler()
    begun = CallDelta(0, "", "call_x", "f")

    pieces = [
        subject.push(TextDelta(1, [], text=CALL, num_tokens=3)),
        subject.push(TextDelta(1, [], calls=(begun, CallDelta(0, "{}")), num_tokens=1)),
        subject.push(TextDelta(1, [], finish=Finish.STOP)),
    ]

    assert (text(pieces), calls(pieces), pieces[-1].finish) == (CALL, [("f", "{}")], "tool_calls")


def test_no_answer_takes_the_fast_path() -> None:
    assert not assembler().is_plain
