from dataclasses import dataclass, field

import pytest
from ray.exceptions import RayError

from penstock.autoscale.serve_agent import CallExecutor
from penstock.wire.serve_agent import Answer, AppPlaces, Call, Place, decode_answer, decode_call, decode_wanted, encode

PLACES = AppPlaces("pool-a", 2, [Place("r1", "RUNNING", "10.0.0.1")])


@dataclass
class ServeControl:
    fails: Exception | None = None
    done: list[tuple[object, ...]] = field(default_factory=list)

    async def locate(self) -> list[AppPlaces]:
        if self.fails is not None:
            raise self.fails
        return [PLACES]

    async def set_target(self, name: str, target: int) -> None:
        self.done.append(("set", name, target))

    async def step_down(self, name: str, victims: tuple[str, ...], target: int) -> bool:
        self.done.append(("down", name, victims, target))
        return True


async def execute(control: ServeControl, *calls: Call) -> list[Answer]:
    executor = CallExecutor(control)
    return [await executor.execute(call) for call in calls]


async def test_calls_are_executed() -> None:
    control = ServeControl()

    answers = await execute(
        control,
        Call("1", 1, "read"),
        Call("2", 1, "set", "pool-a", 2, 5),
        Call("3", 1, "down", "pool-a", 2, 1, ("r1",)),
    )

    assert answers == [Answer(apps=[PLACES]), Answer(), Answer()]
    assert control.done == [("set", "pool-a", 5), ("down", "pool-a", ("r1",), 1)]


async def test_a_target_that_has_changed_since_is_not_set() -> None:
    control = ServeControl()

    assert (
        await execute(control, Call("1", 1, "set", "pool-a", 3, 5), Call("2", 1, "set", "pool-b", 2, 5))
        == [Answer(is_done=False)] * 2
    )
    assert control.done == []


async def test_a_leader_of_an_earlier_term_is_not_obeyed() -> None:
    control = ServeControl()

    answers = await execute(control, Call("1", 5, "read"), Call("2", 4, "set", "pool-a", 2, 5))

    assert answers[1].error is not None
    assert control.done == []


@pytest.mark.parametrize("error", [RayError("gone"), ValueError("no controller"), TimeoutError()])
async def test_what_ray_raises_is_an_answer(error: Exception) -> None:
    assert await execute(ServeControl(fails=error), Call("1", 1, "read")) == [
        Answer(is_done=False, error=type(error).__name__)
    ]


def test_messages_survive_the_way_and_others_are_no_messages() -> None:
    call, answer = Call("1", 2, "down", "pool-a", 2, 1, ("r1",)), Answer(apps=[PLACES])

    assert decode_call(encode(call)) == call
    assert decode_answer(encode(answer)) == answer
    assert decode_wanted(encode({"pool-a": 3})) == {"pool-a": 3}
    assert (decode_call(b"x"), decode_answer(b"x"), decode_wanted(b"x")) == (None, None, {})
