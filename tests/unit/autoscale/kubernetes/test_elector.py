import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.autoscale.kubernetes import elector as elector_module
from penstock.autoscale.kubernetes.elector import Elector, run_elector
from penstock.autoscale.kubernetes.lease import Times
from tests.unit.autoscale.kubernetes.api_fake import FakeServer, client_of

TIMES = Times(duration_s=15, deadline_s=10.0, retry_s=0.0)
"""Attempts follow one another; the clock is the test's."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving the Lease back may take long on a busy machine."""
    monkeypatch.setattr(elector_module, "GIVE_BACK_S", 30.0)
    monkeypatch.setattr(elector_module, "AGAIN_S", 60.0)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


async def turns(server: FakeServer, count: int) -> None:
    """Waits until `count` more calls have been made."""
    wanted = len(server.seen) + count
    while True:
        if len(server.seen) >= wanted:
            return
        await asyncio.sleep(0)


def holder(server: FakeServer) -> str:
    return str(server.objects["lease"]["spec"]["holderIdentity"])


async def test_the_first_one_holds_it_and_renews_by_one_call_each_time(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            await turns(server, 3)
            assert [line.split()[0] for line in server.seen[:4]] == ["GET", "POST", "PUT", "PUT"]
            assert (holder(server), elector.term) == ("a", 0)

        assert holder(server) == "", "given back at the end"
        assert not elector.is_leader()


@pytest.mark.parametrize("page", ["<html>maintenance</html>", "[]", '{"spec": {"renewTime": "soon"}}'])
async def test_an_answer_that_is_no_lease_is_as_good_as_none(tmp_path: Path, page: str) -> None:
    server, clock = FakeServer(), Clock()
    server.script.extend([page])
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            assert holder(server) == "a"


async def test_a_token_that_is_away_for_a_while_costs_attempts_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        token = tmp_path / "token"
        text = token.read_text(encoding="ascii")
        token.unlink()
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            while True:
                if "lease not reached" in caplog.text:  # an attempt has failed
                    break
                await asyncio.sleep(0)
            assert server.seen == []
            token.write_text(text, encoding="ascii")
            await elector.wait_until_leader(is_leader=True)


@pytest.mark.parametrize("spec", [{}, None])
async def test_a_lease_that_nobody_has_held_yet_is_taken_at_once_and_none_is_made(
    spec: dict[str, object] | None, tmp_path: Path
) -> None:
    """The chart makes the Lease so."""
    server, clock = FakeServer(), Clock()
    server.objects["lease"] = {"metadata": {"name": "lease", "resourceVersion": "7", "labels": {"by": "helm"}}} | (
        {} if spec is None else {"spec": spec}
    )
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            await turns(server, 2)
            assert [line.split()[0] for line in server.seen[:3]] == ["GET", "PUT", "PUT"]
            assert (holder(server), elector.term) == ("a", 1)


async def test_who_may_make_no_lease_waits_for_one(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    server.script.extend([200, 403] * 3)
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await turns(server, 6)
            assert [line.split()[0] for line in server.seen[:6]] == ["GET", "POST"] * 3
            assert not elector.is_leader()
            server.put("lease", {})
            await elector.wait_until_leader(is_leader=True)
            assert holder(server) == "a"


async def test_what_others_write_on_the_lease_costs_one_attempt_and_stays(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            server.put("lease", server.objects["lease"]["spec"] | {"preferredHolder": "theirs"})
            await turns(server, 6)

            assert elector.is_leader()
            assert (holder(server), server.objects["lease"]["spec"]["preferredHolder"], elector.term) == (
                "a",
                "theirs",
                0,
            )


async def test_another_takes_it_when_it_is_given_back_and_its_term_is_the_next(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        first, second = (Elector(client, "n", "lease", name, TIMES, clock) for name in "ab")
        async with run_elector(first):
            await first.wait_until_leader(is_leader=True)
            async with run_elector(second):
                await turns(server, 6)
                assert not second.is_leader()
        async with run_elector(second):
            await second.wait_until_leader(is_leader=True)
            assert (holder(server), second.term) == ("b", 1)


async def test_while_the_server_is_away_a_leader_stops_being_one_at_its_deadline(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            await turns(server, 2)
            server.script.extend([503] * 1000)
            await turns(server, 3)
            clock.now += 9.9
            assert elector.is_leader()
            clock.now += 0.2
            assert not elector.is_leader()
            server.script.clear()
            await elector.wait_until_leader(is_leader=True)
            assert elector.term == 0, "nobody else had it"


async def test_a_lease_that_was_taken_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    server, clock = FakeServer(), Clock()
    async with client_of(server, tmp_path) as client:
        elector = Elector(client, "n", "lease", "a", TIMES, clock)
        async with run_elector(elector):
            await elector.wait_until_leader(is_leader=True)
            await turns(server, 2)
            spec = {
                "holderIdentity": "b",
                "leaseDurationSeconds": 15,
                "renewTime": "2026-11-22T14:33:11.123456Z",
                "leaseTransitions": 5,
            }
            server.put("lease", spec)
            await turns(server, 4)
            assert holder(server) == "b"
            assert not elector.is_leader()
            clock.now += 14.9
            await turns(server, 2)
            assert not elector.is_leader()
            clock.now += 0.2
            await elector.wait_until_leader(is_leader=True)
            assert elector.term == 6
