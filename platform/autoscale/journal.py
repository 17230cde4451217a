"""The autoscaler's event log: a line of JSON whenever a pool's target or what Serve runs of it changes, with what the
decision rested on."""

import json
import logging
import math
from pathlib import Path

from penstock.autoscale.observation import Observation
from penstock.autoscale.policy import Decision, Reason

_WORTH_A_LINE = (Reason.STALE, Reason.UNKNOWN, Reason.FULL)
"""Reasons that are news by themselves; others come and go with the load."""

log = logging.getLogger("penstock.autoscale")


class Journal:
    """The event log of the autoscaler: appends lines to the file `path`; if that is None, to the process's log
    alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last: dict[str, tuple[object, ...]] = {}

    def note(
        self,
        pool: str,
        observation: Observation,
        decision: Decision,
        outcome: str,
        victims: tuple[str, ...],
        unix_s: float,
    ) -> None:
        """Notes a decision. outcome: kept, applied, refused (Serve's state had changed), failed or dry run."""
        serve_state = observation.serve_state
        is_news = decision.reason in _WORTH_A_LINE
        state = (serve_state, decision.target, outcome, decision.reason if is_news else None)
        if self._last.get(pool) == state:
            return
        self._last[pool] = state
        line = {
            "unix_s": round(unix_s, 3),
            "pool": pool,
            "target": decision.target,
            "was": serve_state.target,
            "reason": decision.reason.value,
            "outcome": outcome,
            "victims": list(victims),
            "running": list(serve_state.running),
            "starting": serve_state.num_starting,
            "stopping": serve_state.num_stopping,
            "demand": _round_figures(decision.demand),
            "capacity_rps": _round_figures(decision.capacity_rps),
            "predicted_wait_s": _round_figures(decision.predicted_wait_s),
            "queued": observation.num_queued,
            "present": observation.num_present,
            "age_s": _round_figures(observation.age_s),
        }
        log.info("autoscale", extra=line)
        if self._path is not None:
            self._append(self._path, line)

    def _append(self, path: Path, line: dict[str, object]) -> None:
        """Append a line to the file. If the disk is full, the line is lost, and scaling goes on."""
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("event log not written", extra={"error": type(error).__name__})


def _round_figures(value: float) -> float | None:
    """The value with 4 decimals. Returns None if it is infinite, which JSON can't express."""
    return round(value, 4) if math.isfinite(value) else None
