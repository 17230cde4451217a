"""A decision's basis as receipts show it, and back: what is read back gives the decision again (`policy.replay`), to
the last bit.

Not the decision. Pure.
"""

from msgspec.structs import asdict

from penstock.perf.model import Work
from penstock.router.routing.policy import Basis, Compared
from penstock.wire.accounts import ComparedReplica, DecisionBasis
from penstock.wire.frames import StepCosts


def show_basis(basis: Basis) -> DecisionBasis:
    """The basis for a receipt."""
    return DecisionBasis(
        num_tokens=basis.num_tokens,
        expected_output_tokens=basis.expected_output_tokens,
        scored_tokens=basis.scored_tokens,
        num_candidates=basis.num_candidates,
        num_tied=basis.num_tied,
        drawn=None if basis.drawn is None else list(basis.drawn),
        compared=[_show(each) for each in basis.compared],
        mean_backlog_s=basis.mean_backlog_s,
    )


def read_basis(shown: DecisionBasis) -> Basis:
    """The basis that a receipt shows. Raises ValueError for one that no decision can have had."""
    if not shown.compared:
        raise ValueError("it compares no replicas")
    if shown.mean_backlog_s is None or any(each.start_wait_s is None for each in shown.compared):
        raise ValueError("an older version, with other costs, made the decision")
    ids = {each.replica for each in shown.compared}
    if shown.drawn is not None and (len(shown.drawn) != 2 or not ids.issuperset(shown.drawn)):
        raise ValueError(f"{shown.drawn} are not two of the replicas that it compares")
    return Basis(
        shown.num_tokens,
        shown.expected_output_tokens,
        shown.scored_tokens,
        [_read(each) for each in shown.compared],
        shown.num_candidates,
        shown.num_tied,
        None if shown.drawn is None else (shown.drawn[0], shown.drawn[1]),
        shown.mean_backlog_s,
    )


def _show(compared: Compared) -> ComparedReplica:
    costs = asdict(compared.costs)
    stairs = costs.pop("stairs")
    return ComparedReplica(
        replica=compared.replica_id,
        **compared.work._asdict(),
        max_batched_tokens=compared.max_batched_tokens,
        num_inflight=compared.num_inflight,
        cached_tokens=compared.cached_tokens,
        start_wait_s=compared.start_wait_s,
        costs=costs,
        stairs=stairs,
    )


def _read(shown: ComparedReplica) -> Compared:
    unknown = shown.costs.keys() - set(StepCosts.__struct_fields__)
    if unknown:
        raise ValueError(f"the performance model has no coefficient {', '.join(sorted(unknown))}")
    return Compared(
        shown.replica,
        Work(shown.num_running, shown.num_waiting, shown.prefill_tokens, shown.kv_tokens, shown.num_sampled),
        StepCosts(**shown.costs, stairs=shown.stairs),
        shown.max_batched_tokens,
        shown.num_inflight,
        shown.cached_tokens,
        shown.start_wait_s or 0.0,
    )
