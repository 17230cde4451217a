"""Constrained answers of a random model, through scheduler and runner: what comes out keeps to its constraint, and is
the same with drafts, preemptions, on another replica, and beside others."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from penstock.text.grammar import grammar_of
from penstock.text.source import ModelSource
from penstock.text.tokenizer import load_tokenizer
from penstock.wire.errors import InvalidRequest
from penstock.wire.frames import Constraint, Finish
from penstock.workers.compute.grammar.compiler import make_vocabulary
from penstock.workers.compute.grammar.matcher import Allowed, Matcher
from penstock.workers.compute.loading import load_runner
from penstock.workers.compute.models.fused import FusedLlama
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.compute.sampling import Sampler
from penstock.workers.engine.sequence import Sampled, Sequence, Step
from tests.unit.workers.constrained import (
    EOS,
    FIRST,
    SCHEMAS,
    Bench,
    ascii_source,
    constraint,
    ids_of,
    speculating,
    text_of,
)
from tests.unit.workers.tiny_models import engine_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEMPERATURES = (0.0, 1.0)
WORDS = Constraint("regex", "[a-d]{3}( [a-d]{3})*")
"""Text without an end of its own, in which drafts are found."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ascii_source(tmp_path_factory.mktemp("ascii"))


@pytest.fixture(scope="module")
def runner(source: ModelSource, one_torch_thread: None) -> TorchRunner:
    return load_runner(source, engine_config())


@pytest.fixture
def bench(runner: TorchRunner) -> Bench:
    return Bench(runner, engine_config())


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_an_answer_that_stops_keeps_to_its_schema(bench: Bench, number: int, temperature: float) -> None:
    sequences = [bench.sequence(constraint(SCHEMAS[number]), temperature=temperature, seed=seed) for seed in range(4)]

    for output in bench.run(*sequences):
        jsonschema.validate(json.loads(text_of(output)), SCHEMAS[number])
    assert {seq.finish for seq in sequences} == {Finish.STOP}


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (Constraint("choice", '["yes","no"]'), {"yes", "no"}),
        (Constraint("regex", "x[yz]"), {"xy", "xz"}),
        (Constraint("grammar", 'start: "<" inner ">"\ninner: "a" | "b"'), {"<a>", "<b>"}),
    ],
)
def test_every_kind_of_constraint_is_kept(bench: Bench, wanted: Constraint, texts: set[str]) -> None:
    outputs = bench.run(*[bench.sequence(wanted, temperature=2.0, seed=seed) for seed in range(8)])

    assert {text_of(output) for output in outputs} <= texts


def test_an_answer_ends_with_its_last_character_where_nothing_can_follow(bench: Bench) -> None:
    """The constraint says when: before min_tokens, without an end of sequence, and at the last token allowed."""
    wanted = Constraint("choice", '["yes"]')
    sequences = [
        bench.sequence(wanted),
        bench.sequence(wanted, ignore_eos=True),
        bench.sequence(wanted, min_tokens=9),
        bench.sequence(wanted, max_tokens=3),
        bench.sequence(wanted, max_tokens=2),
    ]

    outputs = bench.run(*sequences)

    assert [text_of(output) for output in outputs] == ["yes", "yes", "yes", "yes", "ye"]
    assert all(EOS not in output for output in outputs)
    assert [seq.finish for seq in sequences] == [Finish.STOP] * 4 + [Finish.LENGTH]


def test_the_end_of_sequence_comes_only_where_the_answer_may_end(bench: Bench) -> None:
    """The bias makes it the likeliest token everywhere; ignoring it goes on, and so does min_tokens."""
    wanted, bias = Constraint("regex", "ab(cd)*"), ((EOS, 100.0),)
    sequences = [
        bench.sequence(wanted, logit_bias=bias),
        bench.sequence(wanted, logit_bias=bias, min_tokens=3),
        bench.sequence(wanted, logit_bias=bias, ignore_eos=True, max_tokens=7),
    ]

    outputs = bench.run(*sequences)

    assert [text_of(output) for output in outputs] == ["ab", "abcd", "abcdcdc"]
    assert [output[-1] == EOS for output in outputs] == [True, True, False]


def test_a_stop_token_that_is_no_text_is_offered_where_the_answer_may_end(bench: Bench) -> None:
    (stop,) = ids_of("!")
    sequences = [
        bench.sequence(Constraint("regex", "ab(cd)*"), logit_bias=((stop, 100.0),), stop_token_ids=(stop,), **more)
        for more in ({}, {"ignore_eos": True})
    ]

    outputs = bench.run(*sequences)

    assert [text_of(output) for output in outputs] == ["ab!", "ab!"]
    assert {seq.finish for seq in sequences} == {Finish.STOP}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_is_drafted_changes_no_token(source: ModelSource, temperature: float) -> None:
    plain = load_runner(source, engine_config())
    wanted = [WORDS, constraint(SCHEMAS[1]), constraint(SCHEMAS[5]), None]

    def answers(runner: TorchRunner, method: str) -> tuple[list[list[int]], int]:
        config = speculating("ngram", max_draft_tokens=3) if method != "none" else engine_config()
        bench = Bench(runner, config)
        outputs = bench.run(
            *[bench.sequence(each, "aba aba aba ", temperature=temperature, seed=3, max_tokens=30) for each in wanted]
        )
        return outputs, bench.scheduler.drafts.num_accepted

    expected, _ = answers(plain, "none")
    drafted, num_accepted = answers(load_runner(source, speculating("ngram", max_draft_tokens=3)), "ngram")
    own_model = speculating("draft", model=str(source.path), max_draft_tokens=3)
    by_model, num_accepted_by_model = answers(load_runner(source, own_model), "draft")

    assert drafted == by_model == expected
    assert num_accepted_by_model > 0
    assert temperature or num_accepted > 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_preempted_answer_says_what_it_says_alone(runner: TorchRunner, temperature: float) -> None:
    wanted = [WORDS, constraint(SCHEMAS[1]), WORDS, constraint(SCHEMAS[5])]

    def sequences(bench: Bench) -> list[Any]:
        return [
            bench.sequence(each, temperature=temperature, seed=seed, max_tokens=30) for seed, each in enumerate(wanted)
        ]

    roomy, cramped = Bench(runner, engine_config()), Bench(runner, engine_config(), num_blocks=11)
    expected = [roomy.run(seq)[0] for seq in sequences(roomy)]
    crowded = sequences(cramped)

    assert cramped.run(*crowded) == expected
    assert sum(seq.num_preemptions for seq in crowded) > 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("number", [1, 5])
def test_an_answer_goes_on_elsewhere_from_any_token(
    runner: TorchRunner, source: ModelSource, number: int, temperature: float
) -> None:
    wanted, here = constraint(SCHEMAS[number]), Bench(runner, engine_config())
    elsewhere = Bench(load_runner(source, engine_config()), engine_config())
    (whole,) = here.run(here.sequence(wanted, temperature=temperature))

    for count in range(1, len(whole)):
        seq = elsewhere.sequence(wanted, output=whole[:count], temperature=temperature)
        assert elsewhere.run(seq) == [whole]
    done = elsewhere.sequence(wanted, output=whole, temperature=temperature)
    assert done.grammar is not None
    assert done.grammar.is_complete


def test_an_output_that_does_not_fit_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="does not fit"):
        bench.sequence(constraint(SCHEMAS[0]), output=ids_of("{x"))


def test_rows_without_a_grammar_are_chosen_as_without_the_others(bench: Bench) -> None:
    alone = [bench.run(bench.sequence(None, temperature=temperature, seed=9))[0] for temperature in TEMPERATURES]

    beside = bench.run(
        bench.sequence(constraint(SCHEMAS[1])),
        *[bench.sequence(None, temperature=temperature, seed=9) for temperature in TEMPERATURES],
        bench.sequence(WORDS, temperature=1.0),
    )

    assert beside[1:3] == alone


def test_log_probabilities_are_those_of_the_unconstrained_distribution(runner: TorchRunner) -> None:
    def first(wanted: Constraint | None) -> Any:
        bench = Bench(runner, engine_config())
        seq = bench.sequence(wanted, logprobs=96, max_tokens=1)
        bench.scheduler.add(seq)
        step = bench.scheduler.schedule()
        ((choice,),) = runner.launch(step)()
        bench.scheduler.commit(step, [[choice]])
        runner.forget(seq)
        return choice

    free, bound = first(None), first(Constraint("choice", '["~"]'))

    assert bound.token_id == ord("~") - FIRST
    assert bound.logprobs.top == free.logprobs.top
    assert bound.logprobs.logprob == dict(free.logprobs.top)[bound.token_id]


def test_a_step_that_is_run_again_chooses_the_same(bench: Bench) -> None:
    """What a step has chosen and nobody committed leaves nothing in the grammar."""
    seq, expected = (bench.sequence(constraint(SCHEMAS[1]), temperature=1.0) for _ in range(2))
    (whole,) = bench.run(expected)
    bench.scheduler.add(seq)
    while bench.scheduler.has_work:
        step = bench.scheduler.schedule()
        bench.runner.launch(step)()
        again = bench.runner.launch(Step(step.chunks, []))()
        bench.scheduler.commit(step, again)

    assert seq.token_ids[seq.num_prompt_tokens :] == whole


def test_greedy_answers_are_the_same_beside_free_rows_as_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest logit is taken, beside free rows, where the grammar allows it, without a look at the others. Alone,
    all logits are looked at."""
    accept, taken = Sampler.accept, []

    def count(self: Sampler, seq: Sequence, token_id: int, score: float) -> Sampled | None:
        taken.append(choice := accept(self, seq, token_id, score))
        return choice

    monkeypatch.setattr(Sampler, "accept", count)
    loose = Constraint("regex", "[ -~]{20}")

    def constrained() -> list[Sequence]:
        return [
            bench.sequence(loose, "ab"),
            bench.sequence(loose, "cd", min_tokens=8, ignore_eos=True),
            bench.sequence(loose, "ef", logprobs=2),
            bench.sequence(loose, "gh", frequency_penalty=1.0),
            bench.sequence(constraint(SCHEMAS[1]), "ij"),
        ]

    alone = [bench.run(each)[0] for each in constrained()]
    assert taken == []

    free = [bench.sequence(None, prompt, max_tokens=60) for prompt in ("ab", "xy")]
    assert bench.run(*constrained(), *free)[:-2] == alone
    if isinstance(bench.runner._steps.model, FusedLlama):
        assert {choice is None for choice in taken} == {True, False}


class HeldMatcher(Matcher):
    """A matcher whose masks wait for an event."""

    def __init__(self, inner: Matcher, gate: threading.Event) -> None:
        super().__init__(inner._matcher, inner._vocab_size)
        self.gate = gate

    def allowed(self) -> tuple[Allowed, bool]:
        assert self.gate.wait(30)
        return super().allowed()


def test_a_row_whose_mask_is_late_holds_up_no_other(bench: Bench) -> None:
    wanted, gate = constraint(SCHEMAS[1]), threading.Event()
    (expected,) = bench.run(bench.sequence(wanted, temperature=1.0))
    late, other = bench.sequence(wanted, temperature=1.0), bench.sequence(None, max_tokens=20)
    assert isinstance(late.grammar, Matcher)
    late.grammar = HeldMatcher(late.grammar, gate)
    bench.scheduler.add(late)
    bench.scheduler.add(other)

    gained = [bench.step() for _ in range(5)]
    gate.set()
    while bench.scheduler.has_work:
        bench.step()

    assert gained == [[0, 1]] * 5
    assert late.token_ids[late.num_prompt_tokens :] == expected
    assert other.num_output_tokens == 20


def test_a_grammar_that_reaches_a_limit_ends_its_row_alone(bench: Bench, source: ModelSource) -> None:
    seq, other = bench.sequence(constraint(SCHEMAS[1])), bench.sequence(None, max_tokens=5)
    vocabulary = make_vocabulary(load_tokenizer(source), EOS + 1)
    # enough for the first mask and for little more
    limits = LLParserLimits(max_lexer_states=20, precompute_large_lexemes=False, verbose_errors=False)
    grammar = grammar_of(Constraint("regex", "a{1,200}b{1,200}c{1,200}"))
    seq.grammar = Matcher(LLMatcher(vocabulary, grammar, log_level=0, limits=limits), EOS + 1)

    outputs = bench.run(seq, other)

    assert seq.finish is Finish.INVALID
    assert seq.error is not None
    assert "grammar" in seq.error
    assert any(word in seq.error for word in ("limit", "complex", "states")), seq.error
    assert len(outputs[1]) == 5


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_what_a_prediction_drafts_changes_no_token(runner: TorchRunner, temperature: float) -> None:
    bench, wanted = Bench(runner, speculating("none")), constraint(SCHEMAS[5])
    (expected,) = bench.run(bench.sequence(wanted, temperature=temperature))
    predicted, wrong = (bench.sequence(wanted, temperature=temperature) for _ in range(2))
    predicted.prediction, wrong.prediction = expected, [*expected[:4], *ids_of("zzzz"), *expected[4:]]

    assert bench.run(predicted, wrong) == [expected, expected]
    assert bench.scheduler.drafts.num_accepted > 0


def test_the_prompt_of_a_constrained_answer_is_scored_once(bench: Bench) -> None:
    """The mask of the first token is late, so that the row behind the prompt is computed twice."""
    wanted, gate = constraint(SCHEMAS[1]), threading.Event()
    (expected,) = bench.run(bench.sequence(wanted, temperature=1.0))
    seq, free = bench.sequence(wanted, temperature=1.0, prompt_logprobs=1), bench.sequence(None, prompt_logprobs=1)
    assert isinstance(seq.grammar, Matcher)
    seq.grammar = HeldMatcher(seq.grammar, gate)
    for each in (seq, free):
        bench.scheduler.add(each)
    for _ in range(3):
        bench.step()
    gate.set()
    while bench.scheduler.has_work:
        bench.step()

    assert seq.token_ids[seq.num_prompt_tokens :] == expected
    assert seq.num_scored_tokens == seq.num_prompt_tokens - 1
    assert [part.logprobs for part in seq.prompt_logprobs] == [part.logprobs for part in free.prompt_logprobs]


def test_masks_that_leave_nothing_of_a_grammar_end_their_row_alone(bench: Bench) -> None:
    (never,) = ids_of("y")
    seq = bench.sequence(Constraint("choice", '["yes"]'), bad_words=((never,),))
    other = bench.sequence(Constraint("choice", '["no"]'))

    outputs = bench.run(seq, other)

    assert seq.finish is Finish.INVALID
    assert "no token" in (seq.error or "")
    assert text_of(outputs[1]) == "no"


def test_a_checkpoint_without_a_tokenizer_constrains_nothing(tmp_path: Any) -> None:
    source = ascii_source(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    runner = load_runner(source, engine_config())

    with pytest.raises(Exception, match="tokenizer"):
        runner.compile_grammar(WORDS, "t", [])


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
