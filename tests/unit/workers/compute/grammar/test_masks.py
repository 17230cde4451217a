"""Masks beside a step: of each place of a draft, of the ends of an answer, and of rows that are not in time."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.wire.frames import Constraint, SamplingParams
from penstock.workers.compute.grammar import masks as masks_module
from penstock.workers.compute.grammar.compiler import GrammarCompiler
from penstock.workers.compute.grammar.masks import MaskThreads
from penstock.workers.compute.grammar.matcher import Allowed, GrammarFault, Matcher
from penstock.workers.engine.sequence import Chunk, Sequence

EOS, STOP, SIZE = 256, 257, 258
TOKENS: Any = SimpleNamespace(
    token_bytes=[*[bytes([byte]) for byte in range(256)], b"<eos>", b"<stop>"],
    special_ids=frozenset({EOS, STOP}),
    eos_token_ids=frozenset({EOS}),
)
COMPILER = GrammarCompiler(lambda: TOKENS, SIZE)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may take long to begin on a busy machine."""
    monkeypatch.setattr(masks_module, "WAIT_S", 30.0)


def sequence(pattern: str | None, output: bytes = b"", **sampling: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 50} | sampling)
    seq = Sequence("r", [1, 2, *output], params, 2, [], b"", 0.0)
    if pattern is not None:
        seq.constrain(COMPILER.compile(Constraint("regex", pattern), "t", list(output)))
    return seq


def chunk(seq: Sequence, draft: bytes | None = None) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, draft=None if draft is None else list(draft))


def threads() -> MaskThreads:
    return MaskThreads({EOS}, SIZE, num_threads=2)


def allowed(masks: MaskThreads, seq: Sequence) -> list[list[int]]:
    assert masks.find_late([seq], 1) == frozenset()
    return [each.row().nonzero()[0].tolist() for each in masks.of(seq).allowed]


def test_a_draft_is_cut_where_the_grammar_ends_it_and_every_place_has_a_mask() -> None:
    masks, seq = threads(), sequence("abc[xy]")
    one = chunk(seq, b"abd")
    masks.begin([one])

    assert one.draft == list(b"ab")
    assert allowed(masks, seq) == [[ord("a")], [ord("b")], [ord("c")]]


def test_a_draft_that_does_not_fit_at_all_is_none() -> None:
    one = chunk(sequence("abc"), b"xyz")
    threads().begin([one])

    assert one.draft is None


@pytest.mark.parametrize(
    ("sampling", "ends"),
    [
        ({}, [EOS]),
        ({"ignore_eos": True}, []),
        ({"stop_token_ids": (STOP, 999)}, [EOS, STOP]),
        ({"stop_token_ids": (STOP,), "ignore_eos": True}, [STOP]),
    ],
)
def test_ends_may_be_chosen_where_the_answer_may_end_and_nowhere_else(sampling: Any, ends: list[int]) -> None:
    masks, seq = threads(), sequence("a(bc)*", b"a", **sampling)
    masks.begin([chunk(seq, b"b")])

    assert allowed(masks, seq) == [[ord("b"), *ends], [ord("c")]]
    assert masks.of(seq).must_end == [False, False]


def test_only_rows_that_choose_and_have_a_grammar_get_masks() -> None:
    masks, free, bound = threads(), sequence(None), sequence("abc")
    masks.begin([chunk(free), Chunk(bound, 0, 1)])

    assert masks.find_late([free, bound], 2) == frozenset()
    with pytest.raises(KeyError):
        masks.of(bound)


def test_settling_goes_behind_what_was_chosen_and_says_when_all_is_said() -> None:
    masks, seq = threads(), sequence("abc")
    masks.begin([chunk(seq, b"ab")])
    allowed(masks, seq)

    assert not masks.settle(seq, list(b"a"))
    seq.token_ids += b"a"
    masks.begin([chunk(seq)])
    assert allowed(masks, seq) == [[ord("b")]]
    assert masks.settle(seq, list(b"bc"))


class SlowMatcher(Matcher):
    def __init__(self, inner: Matcher) -> None:
        super().__init__(inner._matcher, inner._vocab_size)
        self.gate = threading.Event()
        self.num_asked = 0

    def allowed(self) -> tuple[Allowed, bool]:
        self.num_asked += 1
        assert self.gate.wait(30)
        return super().allowed()


def test_a_late_mask_is_asked_for_once_and_used_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "WAIT_S", 0.001)
    monkeypatch.setattr(masks_module, "LONE_WAIT_S", 0.001)
    masks, slow, quick = threads(), sequence("abc"), sequence("xyz")
    assert isinstance(slow.grammar, Matcher)
    slow.grammar = matcher = SlowMatcher(slow.grammar)
    for _ in range(3):
        one = chunk(slow, b"ab")
        masks.begin([one, chunk(quick)])
        masks.of(quick)  # its thread may be long in coming to it
        assert masks.find_late([slow, quick], 2) == {slow}
        assert masks.find_late([slow], 1) == {slow}
    assert one.draft is None  # the masks of its places may not have been begun
    matcher.gate.set()
    monkeypatch.setattr(masks_module, "WAIT_S", 30.0)

    masks.begin([chunk(slow)])
    assert allowed(masks, slow)[0] == [ord("a")]
    assert matcher.num_asked == 3  # one for each place of the first draft


def test_a_fault_is_told_behind_the_masks_before_it() -> None:
    masks, seq = threads(), sequence("abc")
    assert isinstance(seq.grammar, Matcher)
    seq.grammar = Faulty(seq.grammar)
    masks.begin([chunk(seq, b"ab")])

    assert allowed(masks, seq) == [[ord("a")]]
    assert masks.of(seq).error == "It is too complex."


class Faulty(Matcher):
    """A matcher whose second mask is too much."""

    def __init__(self, inner: Matcher) -> None:
        super().__init__(inner._matcher, inner._vocab_size)
        self.num_asked = 0

    def allowed(self) -> tuple[Allowed, bool]:
        self.num_asked += 1
        if self.num_asked > 1:
            raise GrammarFault("It is too complex.")
        return super().allowed()


def test_what_was_kept_of_a_sequence_is_forgotten() -> None:
    masks, seq = threads(), sequence("abc")
    masks.begin([chunk(seq)])
    masks.forget(seq)

    with pytest.raises(KeyError):
        masks.of(seq)


def test_beside_rows_that_need_no_mask_a_late_one_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "WAIT_S", 0.001)
    monkeypatch.setattr(masks_module, "LONE_WAIT_S", 30.0)
    masks, slow = threads(), sequence("abc")
    assert isinstance(slow.grammar, Matcher)
    slow.grammar = matcher = SlowMatcher(slow.grammar)
    masks.begin([chunk(slow)])
    begun_s = time.monotonic()

    assert masks.find_late([slow], 2) == {slow}
    assert time.monotonic() - begun_s < 10
    matcher.gate.set()


class PlacedMatcher(Matcher):
    """Notes whether each mask was computed in the step's own thread."""

    def __init__(self, inner: Matcher) -> None:
        super().__init__(inner._matcher, inner._vocab_size)
        self.own: list[bool] = []

    def allowed(self) -> tuple[Allowed, bool]:
        self.own.append(threading.current_thread() is threading.main_thread())
        return super().allowed()


def test_after_some_quick_masks_the_next_are_computed_in_the_steps_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "QUICK_S", 30.0)
    masks, seq = threads(), sequence("a*")
    assert isinstance(seq.grammar, Matcher)
    seq.grammar = matcher = PlacedMatcher(seq.grammar)

    def step() -> bool:
        masks.begin([chunk(seq)])
        assert allowed(masks, seq) == [[ord("a"), EOS]]
        masks.settle(seq, list(b"a"))
        seq.token_ids += b"a"
        return matcher.own[-1]

    first = [step() for _ in range(masks_module.FIRST_TRUST + 2)]
    monkeypatch.setattr(masks_module, "QUICK_S", 0.0)
    slow = step()
    monkeypatch.setattr(masks_module, "QUICK_S", 30.0)
    again = [step() for _ in range(2 * masks_module.FIRST_TRUST + 1)]
    monkeypatch.setattr(masks_module, "OWN_THREAD_S", -1.0)

    assert first == [False] * masks_module.FIRST_TRUST + [True, True]
    assert slow
    assert again == [False] * (2 * masks_module.FIRST_TRUST) + [True]
    assert not step(), "the step's time for masks was over"
