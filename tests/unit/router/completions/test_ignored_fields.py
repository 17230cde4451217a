"""Fields that change nothing, as a client sees them: a header, a count, and strictness where it is asked for."""

import pytest

from penstock.router.config import GatewayConfig
from tests.unit.router.http_fakes import Script, World, events, running_gateway

HEADER = "x-penstock-ignored-fields"
STRICT = {"x-penstock-strict": "1"}


def counts(world: World) -> dict[str, float]:
    """Value of the counter by its label."""
    return {
        sample.labels["field"]: sample.value
        for metric in world.metrics.ignored_fields.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


async def test_a_response_names_the_ignored_fields_and_others_have_no_such_header() -> None:
    async with running_gateway() as world:
        with_some = await world.chat(user="u", foo=1, messages=[{"role": "user", "content": "Hi", "name": "me"}])
        streamed = await world.complete(stream=True, store=True)
        without = await world.chat(temperature=0)

        assert with_some.status_code == streamed.status_code == without.status_code == 200
        assert with_some.headers[HEADER] == "user, foo, messages.name"
        assert streamed.headers[HEADER] == "store"
        assert events(streamed)[-1] == "[DONE]"
        assert HEADER not in without.headers


async def test_a_refusal_behind_the_body_names_them_too() -> None:
    async with running_gateway() as world:
        response = await world.chat(model="nobody", foo=1)

        assert (response.status_code, response.headers[HEADER]) == (404, "foo")


async def test_ignored_fields_are_counted_by_name() -> None:
    async with running_gateway() as world:
        await world.chat(user="u", foo=1, bar=2)
        await world.chat(user="u", messages=[{"role": "user", "content": "Hi", "name": "me"}])
        await world.chat(temperature=0)

        assert counts(world) == {"user": 2, "other": 2, "messages.name": 1}
        assert b"penstock_ignored_fields_total" in world.metrics.render()


@pytest.mark.parametrize("is_strict_gateway", [False, True])
async def test_unknown_fields_are_refused_where_strictness_is_asked_for(is_strict_gateway: bool) -> None:
    async with running_gateway(config=GatewayConfig(strict=is_strict_gateway)) as world:
        if not is_strict_gateway:
            assert (await world.chat(foo=1)).status_code == 200
            world.client.headers.update(STRICT)
        refused = await world.chat(foo=1, user="u")
        harmless = await world.chat(user="u")

        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "Unrecognized request argument supplied: foo"
        assert refused.json()["error"]["param"] == "foo"
        assert (harmless.status_code, harmless.headers[HEADER]) == (200, "user")
        assert counts(world).get("other", 0) == (0 if is_strict_gateway else 1)


async def test_ignored_fields_change_nothing_of_what_is_asked() -> None:
    async with running_gateway(Script("ab")) as world:
        plain = await world.chat(seed=1, stop=["x"], n=2)
        extended = await world.chat(seed=1, stop=["x"], n=2, foo={"temperature": 0}, metadata={"a": "b"})

        assert extended.json()["choices"] == plain.json()["choices"]
        first, second = world.dispatcher.generations[:2], world.dispatcher.generations[2:]
        assert [one.sampling for one in first] == [one.sampling for one in second]
        assert [one.packed_token_ids for one in first] == [one.packed_token_ids for one in second]
