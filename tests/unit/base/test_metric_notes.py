import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.base.metric_notes import MAX_OBSERVATIONS, Notes
from penstock.base.metrics import Metrics


def test_what_is_noted_is_there_for_whoever_reads() -> None:
    metrics = Metrics()
    requests, seconds = metrics.requests.labels("m", "200"), metrics.request_s.labels("m")
    for _ in range(3):
        metrics.notes.count(requests)
    metrics.notes.count(requests, 4)
    metrics.notes.observe(seconds, 0.5)

    page = metrics.render().decode()

    assert 'penstock_requests_total{code="200",model="m"} 7.0' in page
    assert 'penstock_request_seconds_count{model="m"} 1.0' in page
    assert 'penstock_request_seconds_sum{model="m"} 0.5' in page
    assert metrics.render().decode() == page, "a sample is recorded once"


def test_observations_do_not_wait_for_a_reader_that_never_comes() -> None:
    registry, notes = CollectorRegistry(), Notes()
    counter, histogram = Counter("c", "", registry=registry), Histogram("h", "", registry=registry)
    notes.count(counter)
    for _ in range(MAX_OBSERVATIONS - 1):
        notes.observe(histogram, 1.0)
    assert registry.get_sample_value("h_count") == 0, "the notes do not stand on this registry"

    notes.observe(histogram, 1.0)

    assert registry.get_sample_value("h_count") == MAX_OBSERVATIONS
    assert registry.get_sample_value("c_total") == 1


def test_a_negative_increment_fails_where_it_is_noted() -> None:
    notes, counter = Notes(), Counter("c", "", registry=CollectorRegistry())

    with pytest.raises(ValueError, match="can't go back"):
        notes.count(counter, -1)
