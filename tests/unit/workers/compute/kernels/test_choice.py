"""The choice by the C++ kernels, at every level of this machine, against numpy's, bit for bit."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.compute.choice import choose_by_numpy
from penstock.workers.compute.kernels.build import SOURCES, UNFUSED, source
from penstock.workers.compute.kernels.choice import ChoiceInput, ChoiceKernels, Chosen
from penstock.workers.compute.kernels.library import Library
from penstock.workers.compute.kernels.matmul import Level
from penstock.workers.compute.noise import gumbel, stream_start
from penstock.workers.compute.truncation import least_of_min_p
from tests.unit.workers.built_kernels import built_kernels

LEVELS = (Level.PORTABLE, Level.AVX2, Level.VNNI)
"""Levels that differ in how tokens are chosen."""
SIZES = (1, 2, 63, 64, 65, 700, 4099)


@pytest.fixture(scope="module")
def library() -> Library:
    return built_kernels()


@pytest.fixture(params=LEVELS, ids=lambda level: level.name.lower())
def kernels(library: Library, request: pytest.FixtureRequest) -> Iterator[ChoiceKernels]:
    if not library.matmul.set_level(request.param):
        pytest.skip(f"this CPU does not have {request.param.name}")
    yield library.chooser()
    library.matmul.set_level(None)


def random_input(seed: int) -> ChoiceInput:
    """A row of any size and shape with any parameters: ties, holes and extremes among them."""
    draw = np.random.default_rng(seed)
    size = int(draw.choice(SIZES))
    raw = draw.normal(0, draw.choice((0.0, 1e-4, 0.5, 3, 30)), size).astype(np.float32)
    if draw.random() < 0.4:
        raw = np.round(raw)
    if draw.random() < 0.3:
        raw[draw.integers(0, size, size // 3)] = -np.inf
        raw[draw.integers(size)] = 1.0
    logits = raw.copy()
    if draw.random() < 0.5:
        logits[draw.integers(0, size, 5)] += np.float32(draw.choice((-100, 3, 100)))
    return ChoiceInput(
        logits, raw,
        temperature=float(np.float32(draw.choice((0.0, 1e-5, 0.3, 1.0, 2.0)))),
        top_k=int(draw.choice((0, 0, 1, 2, 50, size // 2, size))) % size,
        top_p=float(draw.choice((1.0, 1.0, 0.0, 1e-12, 0.1, 0.5, 0.9, 0.99, 0.999999999))),
        least=least_of_min_p(float(draw.choice((0.0, 0.0, 1e-6, 0.1, 1.0)))),
        stream=stream_start(int(draw.integers(2**62)), int(draw.integers(10_000))),
        num_top=draw.choice((None, 0, 1, 20)),
    )  # fmt: skip


def by_numpy(rows: Sequence[ChoiceInput]) -> list[Chosen | None]:
    """Chosen with lists for comparing."""
    return [choose_by_numpy(row) for row in rows]


def same_size(rows: list[ChoiceInput]) -> Iterator[list[ChoiceInput]]:
    for size in SIZES:
        group = [row for row in rows if len(row.logits) == size]
        if group:
            yield group


def normal(chosen: Sequence[Chosen | None]) -> list[tuple[object, ...] | None]:
    return [None if one is None else (one.token_id, one.weight, one.raw_best, list(one.top_ids)) for one in chosen]


@pytest.mark.parametrize("seed", range(12))
def test_every_level_chooses_what_numpy_chooses_in_one_row_or_in_many_by_one_thread_or_more(
    kernels: ChoiceKernels, seed: int
) -> None:
    for group in same_size([random_input(1000 * seed + index) for index in range(60)]):
        expected = normal(by_numpy(group))

        assert normal(kernels.choose(group, threads=1)) == expected
        assert normal(kernels.choose(group, threads=3)) == expected
        assert [normal(kernels.choose([row], threads=1))[0] for row in group] == expected


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@settings(max_examples=150, deadline=None)
@given(
    scores=st.lists(st.floats(-60, 60, width=32) | st.sampled_from((0.0, -0.0, 1.0)), min_size=1, max_size=150),
    temperature=st.floats(2.0**-16, 2, width=32),
    top_k=st.integers(0, 160),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_scores_and_parameters_choose_what_numpy_chooses(
    library: Library,
    level: Level,
    scores: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    if not library.matmul.set_level(level):
        pytest.skip(f"this CPU does not have {level.name}")
    logits = np.array(scores, dtype=np.float32)
    row = ChoiceInput(
        logits, logits, temperature, top_k, top_p, least_of_min_p(min_p), stream_start(seed, 3), num_top=7
    )
    try:
        found = normal(library.chooser().choose([row], threads=1))
    finally:
        library.matmul.set_level(None)

    assert found == normal(by_numpy([row]))


@pytest.mark.parametrize("spread", [0.0, 0.2, 3.0])
def test_a_large_vocabulary_is_chosen_from_as_numpy_does(kernels: ChoiceKernels, spread: float) -> None:
    for seed in range(4):
        logits = np.random.default_rng(seed).normal(0, spread, 128_256).astype(np.float32)
        rows = [
            ChoiceInput(logits, logits, 0.9, top_k, top_p, least, stream_start(seed, 1), 20)
            for top_k, top_p, least in ((0, 1.0, -math.inf), (0, 0.95, -math.inf), (5000, 0.9, -8.0), (0, 1e-7, -1.0))
        ]

        assert normal(kernels.choose(rows, threads=2)) == normal(by_numpy(rows))


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 1.0])
def test_equal_logits_and_ones_that_differ_in_the_last_bit_are_chosen_as_numpy_does(
    kernels: ChoiceKernels, temperature: float
) -> None:
    """However large they are: from 2e10 to 1e17 on, by temperature, sums with noise are rounded to the logits alone."""
    draw = np.random.default_rng(5)
    scaled = float(np.float32(temperature))
    for size in (1.0, 1e4, 3e7, 1e10, 2.5e11, 5e11, 1e12, 1e30):
        equal = np.full(4099, size, dtype=np.float32)
        near = np.where(draw.random(4099) < 0.5, equal, np.nextafter(equal, np.float32(0)))
        rows = [
            ChoiceInput(logits, logits, scaled, 0, 1.0, -math.inf, stream_start(seed, 9), None)
            for logits in (equal, -equal, near, -near)
            for seed in range(10)
        ]

        assert normal(kernels.choose(rows, threads=1)) == normal(by_numpy(rows))


def test_sums_that_differ_by_less_than_scores_are_rounded_by_are_chosen_as_numpy_does(kernels: ChoiceKernels) -> None:
    """Scores are rounded relative to the largest logit, which is not that of the tokens with the most noise."""
    size, draw, places = 700, np.random.default_rng(11), np.arange(700)
    rows = []
    for seed in range(400):
        temperature = float(np.float32(draw.choice((0.3, 0.8, 2.0))))
        noise = gumbel(seed, 9, places)
        order = np.argsort(noise)
        logits = np.full(size, -100.0, dtype=np.float32)
        base, count = draw.normal(0, 30), draw.integers(2, 7)
        for place in order[-count:]:
            logit = np.float32(base + temperature * (8 - noise[place]))
            for _ in range(draw.integers(3)):
                logit = np.nextafter(logit, np.float32(math.inf))
            logits[place] = logit
        logits[order[0]] = base + temperature * 9
        rows.append(ChoiceInput(logits, logits, temperature, 0, 1.0, -math.inf, stream_start(seed, 9), None))
    expected = by_numpy(rows)

    assert len({one.token_id for one in expected if one is not None}) > 100
    assert normal(kernels.choose(rows, threads=1)) == normal(expected)


def test_what_lies_far_below_the_best_counts_in_top_p(kernels: ChoiceKernels) -> None:
    """All of 49,152 tokens at -13 weigh a ninth of one at 0."""
    logits = np.full(49_152, -13.0, dtype=np.float32)
    logits[777] = 0.0
    rows = [
        ChoiceInput(logits, logits, 1.0, 0, top_p, -math.inf, stream_start(seed, 2), None)
        for top_p in (0.9, 0.95)
        for seed in range(40)
    ]
    expected = by_numpy(rows)

    assert {one.token_id for one in expected[:40] if one is not None} == {777}
    assert any(one is not None and one.token_id != 777 for one in expected)
    assert normal(kernels.choose(rows, threads=1)) == normal(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 699])
def test_a_row_that_is_not_of_numbers_has_no_choice_and_its_neighbours_have(
    kernels: ChoiceKernels, value: float, place: int
) -> None:
    good = random_input(3)._replace(logits=np.arange(700, dtype=np.float32), raw=np.arange(700, dtype=np.float32))
    bad = good.logits.copy()
    bad[place] = value
    nothing = np.full(700, -np.inf, dtype=np.float32)
    masked = good._replace(raw=bad, num_top=1)

    for temperature in (0.0, 1.0):
        rows = [
            good._replace(temperature=temperature), good._replace(logits=bad, raw=bad, temperature=temperature),
            good._replace(logits=nothing, temperature=temperature), masked._replace(temperature=temperature),
        ]  # fmt: skip
        found = kernels.choose(rows, threads=1)

        assert found[1:] == [None, None, None]
        assert normal(found) == normal(by_numpy(rows))


def test_parameters_that_are_not_numbers_still_choose_a_token_of_the_row(kernels: ChoiceKernels) -> None:
    logits = np.random.default_rng(1).normal(0, 3, 700).astype(np.float32)
    for top_p, least, top_k in ((math.nan, -math.inf, 0), (0.5, math.nan, 0), (-1.0, 5.0, -7), (0.5, -1.0, 2**62)):
        row = ChoiceInput(logits, logits, 1.0, top_k, top_p, least, 7, 3)
        [chosen] = kernels.choose([row], threads=1)

        assert chosen is not None
        assert 0 <= chosen.token_id < 700


def test_roundings_that_define_a_choice_are_never_fused() -> None:
    defining = [source for source in SOURCES if source.parent.name == "sampling"]

    assert len(defining) == 3
    assert all(set(UNFUSED) <= set(source().flags_of(file)) for file in defining)
    assert not any(set(UNFUSED) & set(source().flags_of(file)) for file in SOURCES if file not in defining)
