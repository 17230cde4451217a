"""`penstock receipt`: the decision of a receipt made again from what it rested on, with the cost of each replica."""

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.router.routing.policy import Basis, Decision, replay, score_again
from penstock.router.routing.recorded import read_basis
from penstock.wire.accounts import ChoiceReceipt, RequestReceipt

STDIN = Path("-")


def read_receipt(path: Path) -> RequestReceipt:
    """The answer of GET /v1/receipts/{id} in a file, or from stdin for "-". Raises ConfigError if it is none."""
    try:
        content = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
        return msgspec.json.decode(content, type=RequestReceipt)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no receipt of GET /v1/receipts/{{id}}: {error}") from error


def explain_receipt(receipt: RequestReceipt, console: Console) -> bool:
    """Print each choice's decision as it is made again. Returns whether all of them are what the receipt says. Raises
    ConfigError for a basis that no decision can have had."""
    are_same = [_explain(choice, console) for choice in receipt.choices]  # each one is printed
    return all(are_same)


def _explain(choice: ChoiceReceipt, console: Console) -> bool:
    name = escape(choice.id)
    if choice.basis is None:
        console.print(f"{name}: answered by the provider {escape(choice.pool)}; no replica was chosen.")
        return True
    try:
        basis = read_basis(choice.basis)
    except ValueError as error:
        raise ConfigError(f"The basis of {choice.id} can not be read: {error}.") from error
    decision = replay(basis)
    console.print(_table(basis, decision))
    is_same = (decision.replica_id, decision.reason) == (choice.replica, choice.reason)
    found = f"{escape(str(decision.replica_id))}, {decision.reason}"
    compared = f"{basis.num_tied} of {basis.num_candidates} candidates cost the same"
    if is_same:
        console.print(f"{name}: {found}, as the receipt says; {compared}.")
    else:
        console.print(f"{name}: {found}; the receipt says {escape(choice.replica)}, {escape(choice.reason)}.")
    return is_same


def _table(basis: Basis, decision: Decision) -> Table:
    table = Table("replica", "cost", "first token", "cached", "running", "waiting", "in flight", "", box=None)
    for each in basis.compared:
        cost_s, ttft_s = score_again(basis, each)
        is_drawn = basis.drawn is not None and each.replica_id in basis.drawn
        mark = "chosen" if each.replica_id == decision.replica_id else "drawn" if is_drawn else ""
        work = each.work
        table.add_row(
            escape(each.replica_id),
            f"{cost_s:.4f} s",
            f"{ttft_s:.4f} s",
            f"{each.cached_tokens} of {basis.num_tokens}",
            str(work.num_running),
            str(work.num_waiting),
            str(each.num_inflight),
            mark,
        )
    return table
