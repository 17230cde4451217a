import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.compute import noise
from penstock.workers.compute.noise import gumbel, noisy_argmax, stream_start

VOCAB = np.arange(49152)
GOLDEN = ["0x1.9cdc7d92803cfp-1", "-0x1.93497013920bdp+0", "-0x1.ba4c9fef478e0p-1", "0x1.29878bcb06583p-1"]


def splitmix64(state: int, count: int) -> list[int]:
    """The generator as published: Steele, Lea, Flood 2014, figure 17."""
    mask, out = 2**64 - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_the_mixing_function_gives_the_published_sequence_of_seed_1234567() -> None:
    states = np.array([(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(1, 6)], dtype=np.uint64)

    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert noise._mix(states).tolist() == published == splitmix64(1234567, 5)


def test_noise_is_what_it_was_when_it_was_defined() -> None:
    noise_values = [value.hex() for value in gumbel(seed=42, position=7, token_ids=np.array([0, 1, 2, 49151])).tolist()]

    assert noise_values == GOLDEN


def test_noise_is_gumbel_of_the_upper_bits_of_the_position_s_stream() -> None:
    seed, position, token = 2**63 - 1, 100_000, 31337
    stream = splitmix64(splitmix64(seed, 1)[0], position + 1)[position]
    bits = splitmix64((stream + (token - 1) * 0x9E3779B97F4A7C15) % 2**64, 1)[0]
    u = ((bits >> 12) + 0.5) / 2**52

    assert gumbel(seed, position, np.array([token]))[0] == pytest.approx(-math.log(-math.log(u)), rel=1e-14)


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**20),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=30, unique=True),
)
def test_the_noise_of_a_token_does_not_depend_on_the_others(seed: int, position: int, token_ids: list[int]) -> None:
    together = gumbel(seed, position, np.array(token_ids))

    assert together.tolist() == [gumbel(seed, position, np.array([token_id]))[0] for token_id in token_ids]


def test_the_logarithm_is_within_three_units_of_the_last_place_from_1e_minus_17_to_1e3() -> None:
    x = np.concatenate([np.logspace(-17, 3, 20_001), 1 - np.logspace(-16, -1, 5_000), 1 + np.logspace(-15, 0, 5_000)])
    expected = np.log(x.astype(np.longdouble))

    assert (np.abs(noise._log(x) - expected) <= 3 * np.spacing(np.abs(expected).astype(np.float64))).all()


def test_uniforms_never_reach_0_or_1() -> None:
    extreme = ((np.array([0, 2**64 - 1], dtype=np.uint64) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    assert 0 < extreme[0] < extreme[1] < 1
    assert np.isfinite(-noise._log(-noise._log(extreme))).all()


def test_noise_has_the_moments_and_the_distribution_of_gumbel() -> None:
    sample = np.sort(np.concatenate([gumbel(seed, position, VOCAB) for seed in (0, 1) for position in (0, 1)]))
    size = len(sample)
    distance = np.abs(np.exp(-np.exp(-sample)) - (np.arange(size) + 0.5) / size).max()

    assert abs(sample.mean() - 0.5772156649) < 5 * math.pi / math.sqrt(6 * size)
    assert distance < 1.95 / math.sqrt(size)  # Kolmogorov-Smirnov, p = 0.001


def test_streams_of_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    streams = np.stack([gumbel(seed, position, VOCAB) for seed in range(4) for position in range(4)])
    correlation = np.corrcoef(streams) - np.eye(len(streams))

    assert np.abs(correlation).max() < 5 / math.sqrt(len(VOCAB))


@given(st.integers(0, 2**63 - 1), st.integers(0, 4096), st.integers(1, 3000))
def test_the_shortcut_finds_the_argmax_of_exact_noise(seed: int, position: int, size: int) -> None:
    ids = np.arange(size) * 3
    scores = np.random.default_rng(seed % 2**32).normal(0, 3, size)

    found = noisy_argmax(scores, stream_start(seed, position), ids)

    assert found == ids[np.argmax(scores + gumbel(seed, position, ids))]


def test_masked_tokens_are_never_chosen() -> None:
    scores = np.full(1000, -np.inf)
    scores[[17, 400]] = 0.0

    assert {noisy_argmax(scores, stream_start(1, position), np.arange(1000)) for position in range(50)} == {17, 400}
