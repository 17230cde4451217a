"""Records of the fake server, whose truth is known."""

import asyncio

import pytest
import uvloop

from penstock_loadtest.client.client import Client, Clock
from penstock_loadtest.client.target import find_target
from penstock_loadtest.fake.behaviour import Behaviour, Fault, FaultKind, Shedding
from penstock_loadtest.fake.server import FakeServer
from penstock_loadtest.planned import Planned
from penstock_loadtest.results.records import Record
from penstock_loadtest.scenario import Lengths
from tests.unit.loadtest.client.client_world import CHAT, LONG_S, changed

pytestmark = pytest.mark.uvloop  # the loop that the tester runs on


def faked(behaviour: Behaviour, planned: Planned = CHAT, count: int = 1) -> tuple[list[Record], FakeServer]:
    async def main() -> tuple[list[Record], FakeServer]:
        async with FakeServer(behaviour) as server:
            client = Client(await find_target(server.url, keys={}, timeout_s=LONG_S), Clock())
            now_s = client.clock.now()
            sends = [client.send(planned, intended_s=now_s, deadline_s=now_s + LONG_S) for _ in range(count)]
            records = [(await send).record for send in sends]
            await client.close()
            return records, server

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def behaves(fault: FaultKind | None = None, **fields: object) -> Behaviour:
    faults = [] if fault is None else [Fault(kind=fault, numbers=[0], after_tokens=3, delay_s=0.05)]
    ttft_s, gap_s = Lengths(constant=0.001), Lengths(constant=0.0005)
    return Behaviour(ttft_s=ttft_s, gap_s=gap_s, faults=faults, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_the_server_sent_is_what_is_recorded(endpoint: str, stream: bool) -> None:
    records, server = faked(behaves(), changed(endpoint=endpoint, stream=stream), count=3)

    for record, truth in zip(records, server.truths, strict=True):
        assert (record.outcome, record.violations, record.tokens_from) == ("finished", [], "ids")
        assert record.tokens == record.metered_tokens == 8
        assert record.prompt_tokens == truth.prompt_tokens
        assert (record.tier, record.replica) == ("edge", "fake-0")
    assert len({record.answer_digest for record in records}) == 1


@pytest.mark.parametrize(
    ("fault", "outcome", "violations", "tokens"),
    [
        ("close_before_headers", "failed", [], 0),
        ("close_mid_stream", "failed", ["broken off"], 3),
        ("error_event", "failed", [], 3),
        ("no_done", "finished", ["no [DONE]"], 8),
        ("double_finish", "finished", ["two ends"], 8),
        ("wrong_usage", "finished", [], 8),
        ("content_after_finish", "finished", ["tokens behind the end"], 9),
        ("status_500", "failed", [], 0),
        ("slow_headers", "finished", [], 8),
    ],
)
def test_every_fault_of_the_fake_server_is_seen_for_what_it_is(
    fault: FaultKind, outcome: str, violations: list[str], tokens: int
) -> None:
    (record, sound), _ = faked(behaves(fault), count=2)

    assert (record.outcome, record.violations, record.tokens) == (outcome, violations, tokens)
    assert (sound.outcome, sound.violations, sound.tokens) == ("finished", [], 8)


def test_a_server_without_token_ids_and_fields_of_its_own_is_measured_by_usage() -> None:
    records, _ = faked(
        behaves(token_ids=False, refused_fields=["return_token_ids", "ignore_eos", "seed"]), changed(seed=1), count=2
    )

    assert [(record.outcome, record.tokens, record.tokens_from) for record in records] == [("finished", 8, "usage")] * 2
    assert [record.is_resent for record in records] == [True, False]


def test_shed_requests_are_told_from_failed_ones() -> None:
    records, _ = faked(behaves(shedding=Shedding(rate=0.001, burst=1, status=503)), count=3)

    assert [record.outcome for record in records] == ["finished", "shed", "shed"]
    assert records[1].error is not None
    assert records[1].error.startswith("HTTP 503")
