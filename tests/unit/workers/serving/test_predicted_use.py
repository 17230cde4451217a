"""The prediction alone, and what it is good for: more hits in a replica's slots than the least lately used gives, on
traces of Zipf's law."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from random import Random

import pytest

from penstock.workers.serving.predicted_use import MAX_KNOWN, PredictedUse
from penstock.workers.serving.residency import SERVICE_S, Slots

NUM_ADAPTERS, NUM_SLOTS, NUM_REQUESTS = 100, 8, 10_000


def used(half_life: float, digests: str) -> PredictedUse:
    uses = PredictedUse(half_life)
    for digest in digests:
        uses.note(digest)
    return uses


def ranked(uses: PredictedUse, digests: str) -> str:
    return "".join(sorted(digests, key=uses.of))


def test_a_use_counts_half_after_the_half_life() -> None:
    uses = used(4.0, "aabxxxx")  # b: 4 uses ago, a: 5 and 6 uses ago

    assert uses.of("a") / uses.of("x") == pytest.approx((2**-1.5 + 2**-1.25) / (1 + 2**-0.25 + 2**-0.5 + 2**-0.75))
    assert uses.of("never") == 0


@pytest.mark.parametrize(("half_life", "order"), [(0.1, "abc"), (1000.0, "cba")])
def test_with_a_short_half_life_the_last_use_counts_and_with_a_long_one_their_number(
    half_life: float, order: str
) -> None:
    assert ranked(used(half_life, "aaabbc"), "abc") == order


def test_the_order_outlasts_any_number_of_uses() -> None:
    uses = used(1.0, "ab" * 3000 + "a")

    assert ranked(uses, "ab") == "ba"
    assert 0 < uses.of("b") < float("inf")


def test_a_bounded_number_is_remembered_and_the_most_used_are_among_them() -> None:
    uses = PredictedUse(1000.0)
    for number in range(3 * MAX_KNOWN):
        uses.note("hot")
        uses.note(f"once {number}")

    assert uses.of("hot") > uses.of(f"once {3 * MAX_KNOWN - 1}") > 0
    assert uses.of("once 0") == 0


def test_a_deleted_adapter_is_forgotten() -> None:
    uses = used(8.0, "aab")
    uses.forget("a")

    assert ranked(uses, "ab") == "ab"


def trace(skew: float, shift: int, kept: float = 0.0, seed: int = 1) -> list[str]:
    """Adapters by Zipf's law with the exponent `skew`; after every `shift` requests who is popular is drawn anew, but
    for a part `kept` of them; 0: never."""
    random = Random(seed)
    weights = list(itertools.accumulate(1 / (rank + 1) ** skew for rank in range(NUM_ADAPTERS)))
    by_rank = [f"adapter {number}" for number in range(NUM_ADAPTERS)]
    found = []
    for number in range(NUM_REQUESTS):
        if shift and number % shift == 0:
            places = random.sample(range(NUM_ADAPTERS), round((1 - kept) * NUM_ADAPTERS))
            mixed = random.sample(places, len(places))
            changed = {place: by_rank[other] for place, other in zip(places, mixed, strict=True)}
            by_rank = [changed.get(place, digest) for place, digest in enumerate(by_rank)]
        found.append(random.choices(by_rank, cum_weights=weights)[0])
    return found


def hits_of_slots(requests: list[str]) -> float:
    """Share of the requests of one tenant that find their adapter in a slot; each ends before the next one comes."""
    slots: Slots[str] = Slots(NUM_SLOTS)
    num_hits = 0
    for number, digest in enumerate(requests):
        now = 2 * SERVICE_S * number
        if digest in slots:
            num_hits += 1
        else:
            assert slots.reserve("tenant", now)
            slots.put(digest, digest, "tenant", now)
        assert slots.pin(digest, "tenant", now) is not None
        slots.unpin(digest, now)
    slots.check()
    return num_hits / len(requests)


def hits_of_lru(requests: list[str]) -> float:
    """The same share for slots from which the least lately used adapter leaves."""
    slots: OrderedDict[str, None] = OrderedDict()
    num_hits = 0
    for digest in requests:
        if digest in slots:
            num_hits += 1
            slots.move_to_end(digest)
            continue
        if len(slots) == NUM_SLOTS:
            slots.popitem(last=False)
        slots[digest] = None
    return num_hits / len(requests)


@pytest.mark.parametrize(
    ("skew", "shift", "kept", "gain"),
    [
        (0.0, 0, 0.0, -0.01),  # nobody is popular: there is nothing to predict
        (0.6, 0, 0.0, 0.05),
        (1.0, 0, 0.0, 0.10),
        (1.5, 0, 0.0, 0.04),
        (0.6, 500, 0.0, 0.04),
        (1.0, 500, 0.0, 0.06),
        (1.0, 2000, 0.0, 0.09),
        (1.0, 100, 0.9, 0.08),  # now and then a few change places
        (1.5, 500, 0.0, 0.02),
    ],
)
def test_slots_by_predicted_use_have_more_hits_than_the_least_lately_used(
    skew: float, shift: int, kept: float, gain: float, record_property: Callable[[str, object], None]
) -> None:
    requests = trace(skew, shift, kept)
    predicted, lru = hits_of_slots(requests), hits_of_lru(requests)

    record_property("hits", {"predicted": round(predicted, 3), "lru": round(lru, 3)})
    assert predicted - lru >= gain
