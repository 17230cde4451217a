import pytest

from penstock.tenancy.share import BATCH_FACTOR, SERVICE_CLASSES, Share


def test_batch_counts_with_a_part_of_its_weight() -> None:
    assert Share(4.0, "interactive").rate == Share(4.0, "standard").rate == 4.0
    assert Share(4.0, "batch").rate == 4.0 * BATCH_FACTOR > 0


@pytest.mark.parametrize(("name", "rank"), [*((name, rank) for rank, name in enumerate(SERVICE_CLASSES)), ("new", 1)])
def test_a_class_has_a_rank_and_an_unknown_one_that_of_the_default(name: str, rank: int) -> None:
    assert Share(service_class=name).rank == rank


def test_lines_of_batches_count_apart_with_a_tenth_of_the_weight() -> None:
    share = Share(2.0, "interactive")
    lines = share.for_lines()

    assert (lines.service_class, lines.rate, lines.rank) == ("batch", 0.2, 2)
    assert (share.account("acme"), lines.account("acme")) == ("acme", "acme/batch")
    assert Share(2.0, "batch").account("acme") == "acme", "its own requests"
