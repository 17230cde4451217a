"""The head of a run's page: the line below its heading, and the warnings above its figures."""

from penstock_loadtest.report.folder import Run, Server
from penstock_loadtest.report.number_formats import format_duration, format_number
from penstock_loadtest.report.parts import Banner
from penstock_loadtest.report.table import describe_lateness


def describe_run(run: Run) -> str:
    """The line below the heading: requests, load, length, server, end and folder."""
    summary, scenario = run.summary, run.scenario
    load = (
        f"closed loop of {scenario.concurrency}"
        if scenario.loop == "closed"
        else f"{format_number(summary.offered_rate)} requests/s offered, open loop"
    )
    server = _describe_server(run.server)
    ended = run.ending.ended.replace("T", " ").replace("+00:00", " UTC") if run.ending else ""
    warmup = f", {summary.warmup_requests:,} more to warm up" if summary.warmup_requests else ""
    requests = f"{count_of(summary.requests, 'request')}{warmup}"
    parts = (requests, load, format_duration(summary.span_s), server, ended, run.name)
    return " · ".join(part for part in parts if part)


def _describe_server(server: Server | None) -> str:
    if server is None:
        return ""
    return f"{server.model}, simulated" if server.simulated else f"{server.model} at {server.url}"


def list_banners(run: Run) -> list[Banner]:
    """What a reader has to know before the figures."""
    summary, banners = run.summary, list[Banner]()
    if run.server and run.server.simulated:
        banners.append(Banner("This run was simulated.", run.server.simulated))
    if summary.lateness.is_late:
        banners.append(Banner("The tester was late.", describe_lateness(summary)))
    if run.ending is None:
        banners.append(
            Banner(
                "This run was killed.",
                "The figures are of the requests that were on disk by then; the ledger was not checked.",
            )
        )
    elif run.ending.is_interrupted:
        banners.append(
            Banner(
                "This run was interrupted.", "Requests in flight were cut; they are unfinished, and count as missed."
            )
        )
    if run.ending and run.ending.plan_error:
        banners.append(Banner("The load broke off.", run.ending.plan_error))
    if run.verdict and not run.verdict.is_balanced:
        banners.append(
            Banner("The ledger does not balance.", run.verdict.sentences[1] if len(run.verdict.sentences) > 1 else "")
        )
    if not summary.requests:
        banners.append(Banner("No requests.", "Nothing was measured: no request was intended after the warm-up."))
    elif not summary.outcomes.finished:
        banners.append(
            Banner("No request finished.", "Latencies below, if any, are of requests that ended in another way.")
        )
    return banners


def count_of(count: int, unit: str) -> str:
    return f"{count:,} {unit}" if count == 1 else f"{count:,} {unit}s"
