"""Reading what a server says its tenants used."""

import asyncio
import json
from pathlib import Path

import pytest
import uvloop

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.client.metered_usage import read_metered_usage
from penstock_loadtest.client.target import Target
from penstock_loadtest.errors import TargetUnreachable
from penstock_loadtest.fake.behaviour import Behaviour
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.scenario import Scenario
from penstock_loadtest.studies.measure import measure
from tests.unit.loadtest.raw_server import ReceivedRequest, Wire, response, site

PAGE = json.dumps(
    {"object": "usage", "data": [{"day": "1", "completion_tokens": 3}, {"completion_tokens": 4}]}
).encode()


def read(page: bytes, keys: dict[str, str], asked: list[ReceivedRequest], status: str = "200 OK") -> dict[str, int]:
    async def script(wire: Wire) -> None:
        asked.append(await wire.read_request())
        await wire.send(response(page, status=status))
        await wire.wait_closed()

    async def main() -> dict[str, int]:
        async with site(script) as there:
            return await read_metered_usage(Target(there.url, "one", ["one"], keys, None, None))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_each_tenants_meter_is_read_with_its_own_key() -> None:
    asked: list[ReceivedRequest] = []

    assert read(PAGE, {"a": "key-a", "b": "key-b"}, asked) == {"a": 7, "b": 7}
    assert [question.line for question in asked] == ["GET /v1/usage HTTP/1.1"] * 2
    assert [question.headers["authorization"] for question in asked] == ["Bearer key-a", "Bearer key-b"]


@pytest.mark.parametrize(("page", "status"), [(PAGE, "404 Not Found"), (b"{}", "200 OK"), (b"not json", "200 OK")])
def test_a_server_without_such_a_page_is_refused(page: bytes, status: str) -> None:
    with pytest.raises(TargetUnreachable, match="meter is set"):
        read(page, {"a": "key-a"}, [], status)


def test_tenants_that_share_a_key_are_refused() -> None:
    with pytest.raises(TargetUnreachable, match="a key of its own"):
        read(PAGE, {"a": "key", "b": "key"}, [])


def test_a_run_that_is_to_be_metered_where_nothing_is_sends_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    scenario = Scenario(duration_s=1.0, meter=True)
    with fake_server_process(Behaviour()) as fake, pytest.raises(TargetUnreachable):
        measure(
            scenario,
            find_destination(scenario, fake.url, None, {"OPENAI_API_KEY": "key"}),
            tmp_path / "run",
            console=None,
            plots=False,
        )

    assert not (tmp_path / "run").exists()
