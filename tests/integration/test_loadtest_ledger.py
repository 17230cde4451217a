"""The ledger of whole runs against a fake server that is told what to do wrong: it finds that, names the request, and
finds nothing else."""

from pathlib import Path

import pytest

from penstock_loadtest.client.destination import find_destination
from penstock_loadtest.fake.behaviour import Behaviour, Fault, FaultKind, Shedding
from penstock_loadtest.fake.process import fake_server_process
from penstock_loadtest.results import ledger as entries
from penstock_loadtest.results.ledger import Ledger
from penstock_loadtest.scenario import Arrivals, Cancel, Kind, Lengths, Prompts, Scenario
from penstock_loadtest.studies.measure import measure

SLOW = Lengths(constant=0.005)
KIND = Kind(prompts=Prompts(tokens=Lengths(constant=8)), output_tokens=Lengths(constant=8))


def ledger(folder: Path, behaviour: Behaviour, scenario: Scenario) -> Ledger:
    with fake_server_process(behaviour) as fake:
        return measure(
            scenario, find_destination(scenario, fake.url, None, {}), folder, console=None, plots=False
        ).ledger


def load(requests: int, *, repeat: int = 0, cancel: Cancel | None = None) -> Scenario:
    return Scenario(
        arrivals=Arrivals(process="constant", rate=25),
        requests=requests,
        kinds=[KIND],
        drain_s=5.0,
        repeat=repeat,
        cancel=cancel or Cancel(),
    )


WRONG: list[FaultKind] = ["no_done", "double_finish", "wrong_usage", "content_after_finish", "close_mid_stream"]
ALLOWED: list[FaultKind] = ["error_event", "status_500", "slow_headers", "close_before_headers"]


def test_every_fault_is_found_at_its_request_and_no_other_is(tmp_path: Path) -> None:
    kinds = [*WRONG, *ALLOWED]
    faults = [Fault(kind=kind, numbers=[2 * place + 1], delay_s=0.05) for place, kind in enumerate(kinds)]
    found = ledger(tmp_path / "run", Behaviour(ttft_s=SLOW, gap_s=SLOW, faults=faults), load(2 * len(kinds) + 2))
    blamed = {example.index for violation in found.violations for example in violation.examples}

    assert not found.is_balanced
    assert blamed == {2 * place + 1 for place in range(len(WRONG))}, found.sentences
    differing = next(violation for violation in found.violations if violation.kind == entries.TOKENS_DIFFER)
    assert 2 * WRONG.index("wrong_usage") + 1 in {example.index for example in differing.examples}
    assert found.requests == 2 * len(kinds) + 2
    assert found.tokens.verified > 0
    assert found.tokens.by_usage == found.tokens.by_chunks == 0


@pytest.mark.parametrize(("exact", "is_balanced"), [(True, False), (False, True), (None, True)])
def test_an_answer_that_changed_fails_an_exact_server_alone(
    tmp_path: Path, exact: bool | None, is_balanced: bool
) -> None:
    changed = Fault(kind="different_answer", numbers=[6])
    found = ledger(
        tmp_path / "run", Behaviour(ttft_s=SLOW, gap_s=SLOW, exact=exact, faults=[changed]), load(6, repeat=4)
    )

    assert (found.repeats.compared, found.repeats.different, found.repeats.share) == (4, 1, 0.25)
    assert found.is_balanced is is_balanced
    assert [violation.kind for violation in found.violations] == ([] if is_balanced else [entries.ANSWERS_DIFFER])


def test_a_load_with_cancelled_and_declined_requests_balances(tmp_path: Path) -> None:
    behaviour = Behaviour(ttft_s=Lengths(constant=0.02), gap_s=Lengths(constant=0.02), shedding=Shedding(concurrency=3))
    cancel = Cancel(share=0.5, after_s=Lengths(uniform=(0.01, 0.15)))
    found = ledger(tmp_path / "run", behaviour, load(30, cancel=cancel))

    assert found.is_balanced, found.sentences
    assert found.ends.get("cancelled", 0) > 0
    assert found.requests > found.accepted
    tenant = found.tenants[0]
    assert tenant.least_metered == tenant.completion_tokens
    assert tenant.most_metered is not None
    assert tenant.most_metered > tenant.least_metered


@pytest.mark.parametrize(
    ("behaviour", "source"),
    [(Behaviour(token_ids=False), "by_usage"), (Behaviour(token_ids=False, usage=False), "by_chunks")],
)
def test_tokens_of_a_server_without_ids_are_unverified(tmp_path: Path, behaviour: Behaviour, source: str) -> None:
    found = ledger(tmp_path / "run", behaviour, load(4))

    assert found.tokens.verified == 0
    assert getattr(found.tokens, source) == 32
    assert any("32 delivered tokens are unverified" in sentence for sentence in found.sentences)
