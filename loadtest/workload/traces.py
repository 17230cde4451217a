"""Published traces, as they were published, row by row: what arrived when, how long, and with which shared prefixes.

Lazy: a file is read as far as its rows are drawn, and memory does not grow with it (BurstGPT's sessions apart: one
number each).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec

from penstock_loadtest.errors import ScenarioInvalid, TraceInvalid
from penstock_loadtest.scenario import Trace
from penstock_loadtest.workload import servegen
from penstock_loadtest.workload.lines import MAX_TOKENS, make_line_error, read_csv, read_json, to_number, to_whole
from penstock_loadtest.workload.trace_row import MonotonicTimes, TraceRow, complete_ids, fit_to_replay

MOONCAKE_BLOCK: Final = 512
BAILIAN_BLOCK: Final = 16

Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms; s in Bailian's files
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[HashId]
    chat_id: int | None = None  # only Bailian's files have it


def read_trace(trace: Trace, seed: int = 0) -> Iterator[TraceRow]:
    """The rows of trace.start_s <= time < trace.end_s, in order of time, at their times and with their lengths in the
    replay.

    Times count from the file's first row, wherever it begins in its own time. seed: only ServeGen's client rates draw.
    Raises TraceInvalid (a line that can't be read, a file that is not there, a part without a request) and
    ScenarioInvalid (settings that don't fit the file).
    """
    is_client_rates = trace.format == "servegen" and servegen.is_client_rates(trace.path)
    if trace.rate is not None and not is_client_rates:
        raise ScenarioInvalid(
            f"trace.rate is for ServeGen's client rates, which {trace.path} does not hold; use trace.time_scale."
        )
    rows = (
        servegen.draw_requests(trace, seed) if is_client_rates else _from_first_row(READERS[trace.format](trace.path))
    )
    is_empty = True
    for row in rows:
        if row.at_s >= trace.end_s:
            break
        if row.at_s >= trace.start_s:
            is_empty = False
            yield fit_to_replay(row, trace)
    if is_empty:
        raise TraceInvalid(
            f"{trace.path} has no request between {trace.start_s:g} s and {trace.end_s:g} s after its first row."
        )


def _from_first_row(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """The rows with times that count from the first one's."""
    zero_s: float | None = None
    for row in rows:
        zero_s = row.at_s if zero_s is None else zero_s
        yield msgspec.structs.replace(row, at_s=round(row.at_s - zero_s, 6)) if zero_s else row


def read_mooncake(path: Path) -> Iterator[TraceRow]:
    """JSON lines of kvcache-ai/Mooncake's FAST25-release/traces (timestamp in ms, an id for every 512 tokens). Lines
    with a `chat_id` are those of alibaba-edu/qwen-bailian-usagetraces-anon (timestamp in s, an id for every 16
    tokens)."""
    make_monotonic = MonotonicTimes()
    for number, line in read_json(path, msgspec.json.Decoder(MooncakeLine)):
        unit_s, block_tokens = (1e-3, MOONCAKE_BLOCK) if line.chat_id is None else (1.0, BAILIAN_BLOCK)
        prompt_tokens = max(1, line.input_length)
        try:
            at_s = make_monotonic(line.timestamp * unit_s)
            hash_ids = complete_ids(line.hash_ids, prompt_tokens, block_tokens, number)
        except ValueError as error:
            raise make_line_error(path, number, str(error)) from None
        yield TraceRow(
            at_s=at_s,
            prompt_tokens=prompt_tokens,
            output_tokens=line.output_length,
            hash_ids=hash_ids,
            block_tokens=block_tokens,
        )


def read_azure(path: Path) -> Iterator[TraceRow]:
    """CSV of Azure/AzurePublicDataset's LLM inference traces of 2023, 2024 (times with +00:00) and 2025 (a further
    column, passed over)."""

    def parse(fields: list[str]) -> TraceRow:
        prompt_tokens, output_tokens = to_whole(fields[1], "ContextTokens"), to_whole(fields[2], "GeneratedTokens")
        return TraceRow(at_s=_to_epoch_s(fields[0]), prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    return _read_csv(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), (), parse)


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    """CSV of HPMLL/BurstGPT, releases 1 and 2 (which have sessions in their conversation logs).

    A request with 0 response tokens failed when it was recorded. How long its answer would have been is not known: it
    is left out, as in the files that the authors publish without failures.
    """
    turns: Counter[str] = Counter()

    def parse(fields: list[str]) -> TraceRow | None:
        at_s = to_number(fields[0], "Timestamp")
        prompt_tokens, output_tokens = to_whole(fields[2], "Request tokens"), to_whole(fields[3], "Response tokens")
        if output_tokens == 0:
            return None
        session = fields[4] or None
        turn = turns[session] if session else 0
        if session:
            turns[session] += 1
        return TraceRow(
            at_s=at_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            model=fields[1] or None,
            session=session,
            turn=turn,
        )

    return _read_csv(path, ("Timestamp", "Model", "Request tokens", "Response tokens"), ("Session ID",), parse)


READERS: Final[dict[str, Callable[[Path], Iterator[TraceRow]]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "servegen": servegen.read_requests,
}


def _read_csv(
    path: Path, required: tuple[str, ...], optional: tuple[str, ...], parse: Callable[[list[str]], TraceRow | None]
) -> Iterator[TraceRow]:
    """Rows with times that count from the first one's."""
    make_monotonic = MonotonicTimes()
    zero_s: float | None = None
    for number, fields in read_csv(path, required, optional):
        try:
            row = parse(fields)
            if row is None:
                continue
            zero_s = row.at_s if zero_s is None else zero_s
            at_s = make_monotonic(round(row.at_s - zero_s, 6))
        except ValueError as error:
            raise make_line_error(path, number, str(error)) from None
        yield msgspec.structs.replace(row, at_s=at_s)


def _to_epoch_s(text: str) -> float:
    """Seconds since 1970 of a time in UTC; digits below the microsecond are dropped. ValueError with a sentence."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}, not a time like 2023-11-16 18:17:03.9799600") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
