"""Connections that are spread over gateways: what one decides, what its clients are told, and many of them together."""

import random

import httpx
from starlette.types import Receive, Scope, Send

from penstock.router.transport.connection_balance import Spread, SpreadingApp


def spread_with(num_underway: int) -> Spread:
    spread = Spread()
    spread.num_underway = num_underway
    spread.sample()
    return spread


def num_taken(spread: Spread) -> int:
    return sum(spread.take() for _ in range(1000))


def test_the_fuller_one_ends_half_of_its_surplus_and_the_others_nothing() -> None:
    fuller, even = spread_with(20), spread_with(16)
    fuller.compare([16.0, 14.0, 14.0])
    even.compare([20.0, 14.0, 14.0])

    assert (num_taken(fuller), num_taken(even)) == (2, 0)


def test_nothing_moves_where_one_is_alone_nearly_even_or_hardly_used() -> None:
    alone, nearly, quiet = spread_with(100), spread_with(104), spread_with(1)
    alone.compare([])
    nearly.compare([100.0, 96.0])
    quiet.compare([1.0, 0.0, 0.0])

    assert [num_taken(each) for each in (alone, nearly, quiet)] == [0, 0, 0]


def test_what_is_left_to_end_is_not_added_up() -> None:
    spread = spread_with(40)
    for _ in range(5):
        spread.compare([0.0])

    assert num_taken(spread) == 10
    spread.compare([40.0])
    assert not spread.take()


def test_a_moment_weighs_half() -> None:
    spread = spread_with(8)
    spread.num_underway = 0

    assert [spread.sample(), spread.sample()] == [4.0, 2.0]


def test_connections_placed_at_random_and_kept_get_even() -> None:
    rng, fullest = random.Random(3), []
    for _ in range(20):
        places = [rng.randrange(4) for _ in range(64)]
        gateways = [Spread() for _ in range(4)]
        for _ in range(30):
            for number, gateway in enumerate(gateways):
                gateway.num_underway = places.count(number)
            samples = [gateway.sample() for gateway in gateways]
            for number, gateway in enumerate(gateways):
                gateway.compare(samples[:number] + samples[number + 1 :])
            places = [rng.randrange(4) if gateways[place].take() else place for place in places]
        fullest.append(max(places.count(number) for number in range(4)) / 16)

    assert sum(fullest) / len(fullest) < 1.13
    assert max(fullest) <= 1.2


async def test_posts_are_counted_and_the_answer_that_ends_a_connection_says_so() -> None:
    spread, seen = spread_with(9), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(spread.num_underway)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-mine", b"1")]})
        await send({"type": "http.response.body", "body": b"done"})

    spread.num_underway = 0
    spread.compare([6.0])  # one to end
    async with httpx.AsyncClient(transport=httpx.ASGITransport(SpreadingApp(app, spread)), base_url="http://t") as http:
        page, first, second = await http.get("/"), await http.post("/"), await http.post("/")

    assert seen == [0, 1, 1]
    assert spread.num_underway == 0
    assert ["connection" in answer.headers for answer in (page, first, second)] == [False, True, False]
    assert (first.headers["connection"], first.headers["x-mine"], first.text) == ("close", "1", "done")
