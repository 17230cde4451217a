"""The thinking of each family's answers, as their documentation shows them, cut in any way."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.reasoning import FORMS, ReasoningForm, ReasoningSplitter, Split, choose_reasoning

QWEN3, R1, MISTRAL = FORMS["qwen3"], FORMS["deepseek_r1"], FORMS["mistral"]
SAMPLES = {
    # Qwen3's model card: "<think>\n...\n</think>\n\n..." is what the model writes with enable_thinking, its default
    "qwen3": (
        QWEN3,
        False,
        "<think>\nOkay, the user wants a short introduction.\n\nI should start simple.\n</think>\n\nLLMs are *models*.",
        Split("Okay, the user wants a short introduction.\n\nI should start simple.", "LLMs are *models*."),
    ),
    # the same, enable_thinking=False: the template has written an empty pair into the prompt
    "qwen3 that does not think": (QWEN3, False, "Large language models\n", Split("", "Large language models\n")),
    # Qwen3-...-Thinking-2507's card: "the model output contains only </think> without an explicit opening tag"
    "qwen3 thinking": (QWEN3, True, "Let me see.\n</think>\n\n42", Split("Let me see.", "42")),
    # DeepSeek-R1's card: "<think>\n\n</think>", which the model sometimes writes to bypass its thinking
    "r1 that does not think": (R1, True, "<think>\n\n</think>\n\nParis.", Split("", "Paris.")),
    # its card again, "initiate its response with <think>\n at the beginning of every output"
    "r1 that opens": (R1, True, "<think>\n2+2=4\n</think>\n4", Split("2+2=4", "4")),
    # Magistral's system prompt: "[THINK]Your thoughts ...[/THINK]Here, provide a self-contained response."
    "mistral": (
        MISTRAL,
        False,
        "[THINK]Your thoughts\nor/and draft.[/THINK]Here, provide a self-contained response.",
        Split("Your thoughts\nor/and draft.", "Here, provide a self-contained response."),
    ),
    "cut off": (QWEN3, False, "<think>\nOkay, the </thi", Split("Okay, the </thi", "")),
    "cut off behind white space": (QWEN3, True, "Okay,\n\n", Split("Okay,", "")),
    "cut off in the opening marker": (QWEN3, False, "\n<thi", Split("", "\n<thi")),
    "cut off before anything": (QWEN3, True, "\n", Split("", "")),
    "never closed": (R1, True, "42", Split("42", "")),
    "markers further on": (QWEN3, False, "Use <think>x</think>.", Split("", "Use <think>x</think>.")),
    "markers behind the thinking": (QWEN3, False, "<think>a</think>b</think>", Split("a", "b</think>")),
    "a false end": (QWEN3, True, "a </ b </thin </think>c", Split("a </ b </thin", "c")),
    "white space before it": (QWEN3, False, " \n<think>a</think>b", Split("a", "b")),
    "much white space before it": (QWEN3, False, " " * 65 + "<think>a", Split("", " " * 65 + "<think>a")),
    "nothing": (QWEN3, False, "", Split("", "")),
    "only white space": (QWEN3, False, "  ", Split("", "  ")),
}


def split(form: ReasoningForm, begins_inside: bool, pieces: list[str]) -> Split:
    splitter = ReasoningSplitter(form, begins_inside=begins_inside)
    found = [*map(splitter.push, pieces), splitter.finish()]
    return Split("".join(piece.reasoning for piece in found), "".join(piece.content for piece in found))


@pytest.mark.parametrize("name", SAMPLES)
def test_thinking_and_content_are_told_apart(name: str) -> None:
    form, begins_inside, text, expected = SAMPLES[name]

    assert split(form, begins_inside, [text]) == expected
    assert split(form, begins_inside, list(text)) == expected


@given(
    name=st.sampled_from(sorted(SAMPLES)),
    cuts=st.lists(st.integers(0, 120), max_size=12).map(sorted),
)
def test_how_an_answer_was_cut_changes_nothing(name: str, cuts: list[int]) -> None:
    form, begins_inside, text, expected = SAMPLES[name]
    bounds = [0, *cuts, len(text)]

    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    pieces[-1] = text[cuts[-1] :] if cuts else text

    assert split(form, begins_inside, pieces) == expected


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", " ", "\n", "a", "é"]), max_size=14),
    cuts=st.lists(st.integers(0, 60), max_size=8).map(sorted),
    begins_inside=st.booleans(),
)
def test_whole_is_streamed_for_any_text(parts: list[str], cuts: list[int], begins_inside: bool) -> None:
    text = "".join(parts)
    bounds = [0, *(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]

    whole = split(QWEN3, begins_inside, [text])

    assert split(QWEN3, begins_inside, pieces) == whole
    assert whole.reasoning == whole.reasoning.strip()
    assert "</think>" not in whole.reasoning
    if not begins_inside and not text.lstrip().startswith("<think>"):
        assert whole == Split("", text)


def test_what_is_decided_is_passed_on_at_once() -> None:
    splitter = ReasoningSplitter(QWEN3, begins_inside=False)

    assert splitter.push("<think>\nOne ") == Split("One", "")
    assert splitter.push("two</") == Split(" two", "")
    assert splitter.push("b>") == Split("</b>", "")
    assert splitter.push("</think>") == Split("", "")
    assert not splitter.is_done
    assert splitter.push("\n") == Split("", "")
    assert splitter.push("\n4 ") == Split("", "4 ")
    assert splitter.is_done


def test_an_answer_without_thinking_is_decided_by_its_first_letter() -> None:
    splitter = ReasoningSplitter(QWEN3, begins_inside=False)

    assert splitter.push("P") == Split("", "P")
    assert splitter.is_done
    assert not splitter.has_thought


@pytest.mark.parametrize(
    ("form", "prompt_end", "continued", "expected"),
    [
        (QWEN3, "<|im_start|>assistant\n", None, False),
        (QWEN3, "<|im_start|>assistant\n<think>\n", None, True),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        (R1, "<｜Assistant｜>", None, True),
        (R1, "<｜Assistant｜><think>\n", None, True),
        (R1, "<｜Assistant｜><think>\n\n</think>\n\n", None, False),
        (R1, "<｜Assistant｜>So", "So", False),
        (QWEN3, "<think>\nLet me", "<think>\nLet me", True),
        (QWEN3, "so.</think>The", "<think>so.</think>The", False),
        (MISTRAL, "[/INST][THINK]", None, True),
    ],
)
def test_the_prompts_end_says_where_the_answer_begins(
    form: ReasoningForm, prompt_end: str, continued: str | None, expected: bool
) -> None:
    assert form.begins_inside(prompt_end, continued) is expected


@pytest.mark.parametrize(
    ("template", "tokens", "parser", "expected"),
    [
        ("{{ content.split('</think>')[-1] }}", set(), "auto", QWEN3),
        ("", {"<think>", "</think>"}, "auto", QWEN3),
        ("", {"[THINK]", "[/THINK]"}, "auto", MISTRAL),
        ("", {"<think>"}, "auto", None),
        ("{{ messages }}", set(), "auto", None),
        ("{{ messages }}", set(), "deepseek_r1", R1),
        ("</think>", {"<think>", "</think>"}, "none", None),
    ],
)
def test_the_form_is_found_in_template_or_vocabulary(
    template: str, tokens: set[str], parser: str, expected: ReasoningForm | None
) -> None:
    assert choose_reasoning(template, tokens, parser) == expected  # type: ignore[arg-type]
