"""A router's submissions, checked and converted: they become sequences. Pure."""

import math

from penstock.wire.frames import (
    KEY_BYTES,
    Submit,
    split_keys,
    unpack_token_ids,
)
from penstock.wire.targets import NO_TARGETS, ClassTargets
from penstock.workers.engine.sequence import Sequence, Times


class ProtocolError(Exception):
    """The stream can't go on; the reason is sent to the router."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def check_submission(op: Submit) -> None:
    """Check the lengths in a submission. Raises ProtocolError for those that can't be."""
    has_odd_length = (
        len(op.packed_token_ids) % 4
        or len(op.prediction) % 4
        or len(op.block_keys) % KEY_BYTES
        or len(op.chain_key) != KEY_BYTES
    )
    if has_odd_length or not 0 <= op.num_output_tokens <= len(op.packed_token_ids) // 4:
        raise ProtocolError(f"Sequence {op.sid} is malformed.")


def make_sequence(op: Submit, now_s: float, unix_s: float, targets: ClassTargets = NO_TARGETS) -> Sequence:
    """The sequence of a submission. now_s: its arrival, seconds of the monotonic clock. unix_s: the same moment in Unix
    time, by which the deadline of an older gateway is read. targets: by class, of which the scheduler keeps
    `tpot_s`."""
    token_ids = unpack_token_ids(op.packed_token_ids)
    return Sequence(
        request_id=op.request_id,
        token_ids=token_ids,
        sampling=op.sampling,
        num_prompt_tokens=len(token_ids) - op.num_output_tokens,
        block_keys=split_keys(op.block_keys),
        chain_key=op.chain_key,
        arrival_s=now_s,
        deadline=_read_deadline(op, now_s, unix_s),
        adapter=op.adapter,
        tenant=op.tenant,
        is_batch=op.service_class == "batch",
        weight=op.weight if 0 < op.weight < math.inf else 0.0,
        times=None if op.traceparent is None else Times(),
        cache_scope=op.cache_scope,
        prediction=unpack_token_ids(op.prediction),
        tpot_s=targets.of(op.service_class).tpot_s,
    )


def _read_deadline(op: Submit, now_s: float, unix_s: float) -> float | None:
    """Time of the monotonic clock at which the sequence ends unfinished, seconds. Returns None for no limit."""
    seconds_left = op.seconds_left
    if seconds_left is None and op.deadline is not None:
        seconds_left = op.deadline - unix_s
    return None if seconds_left is None or math.isnan(seconds_left) else now_s + seconds_left
