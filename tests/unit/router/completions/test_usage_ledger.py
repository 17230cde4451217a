"""Usage against a ledger of what was delivered: through losses of replicas, failing sequences, clients that hang up."""

import asyncio
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import PenstockError
from penstock.router.completions.admission import Admission
from penstock.router.completions.completion import Choice, Completion, DeltaListener
from penstock.router.completions.text_assembly import TextPiece
from penstock.tenancy.usage import Used
from penstock.wire.errors import EngineFault
from penstock.wire.frames import Delta, Finish
from tests.unit.router.fleet_fakes import Cluster, FakeMember, generation, settle

PROMPT_TOKENS = 9


class Written:
    """A usage log that keeps the sum."""

    def __init__(self) -> None:
        self.used = Used()

    def add(self, tenant_id: str, model: str, adapter: str, used: Used) -> None:
        self.used = self.used.plus(used)


class Ids:
    """Text of token ids, whatever they are."""

    is_plain = True

    def push(self, delta: Delta) -> TextPiece:
        return TextPiece("", delta.token_ids, None if delta.finish is None else "stop")


class Request:
    """A request under way, and what its client has got."""

    def __init__(self, cluster: Cluster, admission: Admission, number: int, max_tokens: int) -> None:
        assembler: Any = Ids()
        wanted = generation([number] * PROMPT_TOKENS, max_tokens=max_tokens, request_id=f"r{number}")
        self.delivered = 0
        self.has_failed_alone = False
        self._choice = Choice(0, wanted, assembler)
        self._completion = Completion([[self._choice]], cluster.dispatcher, lambda: 0.0, self)
        self._admission = admission
        self._id = wanted.request_id
        self.task = asyncio.ensure_future(self._run())

    async def begin(self, choice: Choice) -> None:
        """Nothing is shown of a prompt."""

    async def emit(self, choice: Choice, piece: TextPiece) -> None:
        self.delivered += len(piece.token_ids)

    def listener(self, choice: Choice, clock: object) -> DeltaListener | None:
        return None

    async def _run(self) -> None:
        self._admission.watch("t", self._id, "m", self._completion)
        try:
            await self._completion.run()
        except EngineFault as error:
            self.has_failed_alone = "poison" in error.message
        except PenstockError:
            pass
        finally:
            self._admission.settle("t", None, self._id, "m", self._completion)

    @property
    def is_charged(self) -> bool:
        """Whether its prompt counts: of an answer that never began, where it was computed for nobody else's fault."""
        receipt = self._choice.receipt
        has_hung_up_meanwhile = self.task.cancelled() and receipt is not None and receipt.is_taken
        return self.delivered > 0 or self.has_failed_alone or has_hung_up_meanwhile


async def run(random: Random) -> None:
    unused: Any = None
    written: Any = Written()
    admission = Admission(unused, written, unused)
    async with Cluster(*[FakeMember(str(number)) for number in range(4)], max_inflight=40) as cluster:
        requests = [Request(cluster, admission, number, random.randrange(1, 30)) for number in range(6)]
        await settle()
        deaths = random.randrange(4)
        for _ in range(30):
            replica = cluster.replicas[str(random.randrange(4))]
            happening = random.choice(["step", "step", "step", "add", "die", "poison", "hang up"])
            if happening == "step":
                cluster.step(random.randrange(1, 4))
            elif happening == "die" and deaths and replica.is_up:
                deaths -= 1
                replica.die()
            elif happening == "poison" and replica.running and not random.randrange(3):
                replica.finish(random.choice(list(replica.running)), Finish.ERROR, "poison")
            elif happening == "hang up" and not random.randrange(4):
                random.choice(requests).task.cancel()
            await settle()
            if happening == "add":
                admission.add_running_usage()
                running = sum(request.delivered for request in requests)
                assert written.used.completion_tokens == running, "a gateway killed now would lose what came before"
        while not all(request.task.done() for request in requests):
            cluster.step()
            await settle()
        await asyncio.gather(*[request.task for request in requests], return_exceptions=True)

        charged = sum(request.is_charged for request in requests)
        delivered = sum(request.delivered for request in requests)
        assert written.used._replace(cached_tokens=0) == Used(charged, charged * PROMPT_TOKENS, 0, delivered)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_usage_is_what_was_delivered_and_the_prompts_of_what_was_computed(seed: int) -> None:
    asyncio.run(run(Random(seed)))
