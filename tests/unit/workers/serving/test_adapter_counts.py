from penstock.wire.frames import AdapterCount
from penstock.workers.serving.adapter_counts import MAX_COUNTED, AdapterCounts, Event


def test_each_event_counts_for_its_tenant_and_adapter_and_for_all() -> None:
    counts = AdapterCounts()
    for event in (Event.WAIT, Event.LOAD, Event.HIT, Event.HIT):
        counts.note("a", "x", event)
    counts.note("a", "y", Event.HIT)
    counts.note("a", "y", Event.EVICTION)

    assert counts.totals == [3, 1, 1, 1]
    assert set(counts.changed_since(0)) == {AdapterCount("a", "x", 2, 1, 1, 0), AdapterCount("a", "y", 1, 0, 0, 1)}


def test_only_what_has_changed_is_told_again() -> None:
    counts = AdapterCounts()
    counts.note("a", "x", Event.LOAD)
    counts.note("b", "x", Event.LOAD)
    told = counts.num_changes
    assert counts.changed_since(told) == ()

    counts.note("a", "x", Event.HIT)

    assert counts.changed_since(told) == (AdapterCount("a", "x", 1, 0, 1, 0),)
    assert len(counts.changed_since(0)) == 2


def test_a_bounded_number_is_remembered_and_the_totals_are_of_all() -> None:
    counts = AdapterCounts()
    for number in range(MAX_COUNTED + 3):
        counts.note(str(number), "x", Event.LOAD)

    found = {count.digest for count in counts.changed_since(0)}
    assert len(found) == MAX_COUNTED
    assert "2" not in found
    assert "3" in found
    assert counts.totals[Event.LOAD] == MAX_COUNTED + 3
