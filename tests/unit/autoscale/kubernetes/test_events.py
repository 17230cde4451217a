"""What is worth an Event, and that each thing is said once."""

from datetime import UTC, datetime

from msgspec import structs

from penstock.autoscale.kubernetes.events import COMPONENT, News, event_of, find_news
from penstock.autoscale.kubernetes.resources import RayCluster
from penstock.wire.explanation import Change, ShortageExplanation
from tests.unit.autoscale.test_sentences import FOUND

UP = Change(1000.0, 1, 3, "demand", "applied")
SHORT = structs.replace(FOUND, shortage=ShortageExplanation("quota", 2, "exceeded quota: gpus"))


def test_a_change_of_a_target_is_news_once() -> None:
    changed = structs.replace(FOUND, changes=(UP,))

    assert find_news(FOUND, changed) == [News("Normal", "TargetChanged", "pool a: target 1 to 3, by demand (applied)")]
    assert find_news(changed, changed) == []
    assert find_news(None, changed) != [], "a new leader has said nothing yet"


def test_a_shortage_is_news_when_it_begins_changes_its_kind_and_ends() -> None:
    (begun,) = find_news(FOUND, SHORT)
    more = structs.replace(SHORT, shortage=ShortageExplanation("quota", 3, "exceeded quota: gpus, again"))
    other = structs.replace(SHORT, shortage=ShortageExplanation("unschedulable", 2, "no node"))

    assert (begun.kind, begun.reason) == ("Warning", "ReplicasUnplaced")
    assert begun.message == "pool a: 2 replicas have no place (quota): exceeded quota: gpus"
    assert find_news(SHORT, more) == []
    assert [news.reason for news in find_news(SHORT, other)] == ["ReplicasUnplaced"]
    assert [(news.kind, news.reason) for news in find_news(SHORT, FOUND)] == [("Normal", "ReplicasPlaced")]


def test_an_event_is_about_the_ray_cluster() -> None:
    cluster = RayCluster("rc", (), "the-uid")
    news = News("Warning", "ReplicasUnplaced", "what happened")

    event = event_of(cluster, "here", news, datetime(2026, 11, 24, 3, 4, 5, tzinfo=UTC))

    assert event["involvedObject"] == {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "name": "rc",
        "namespace": "here",
        "uid": "the-uid",
    }
    assert (event["type"], event["reason"], event["message"]) == news
    assert (event["lastTimestamp"], event["source"]) == ("2026-11-24T03:04:05Z", {"component": COMPONENT})
