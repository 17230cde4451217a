"""The meaning of every figure of a report, in sentences; the page takes them from here only."""

from penstock_loadtest.report.number_formats import format_duration
from penstock_loadtest.results.summary import MAX_LATENESS_S
from penstock_loadtest.scenario import Targets

TERMS = (
    (
        "Intended time",
        "When a request should have left by the plan; a later turn of a conversation never before the answer it "
        "follows.",
    ),
    (
        "TTFT",
        "Time to first token: from the intended time to the first chunk with a token. A stall delays requests that "
        "leave late because of it, and they show it. An answer that is not streamed shows no first token, and has no "
        "TTFT.",
    ),
    (
        "TPOT",
        "Time per output token: from the first to the last chunk with tokens, divided by the tokens behind the first "
        "chunk.",
    ),
    (
        "Inter-token",
        "Gaps between successive tokens of a request. Tokens that came in one chunk share its time, so the gaps "
        "between them are zero.",
    ),
    ("End to end", "From the intended time to the end of the answer, of the requests that finished."),
    (
        "Percentiles",
        "Exact, over the requests that have the figure, whatever became of them. Those that never got a token are in "
        "goodput, not in TTFT.",
    ),
    (
        "Outcomes",
        "finished: the whole answer came. cancelled: we hung up, as planned. shed: the server declined before any "
        "token. failed: any other error. unfinished: no end before the timeout or the end of the run.",
    ),
    ("Offered rate", "Requests a second between the first and the last intended time."),
    (
        "Throughput",
        "Delivered tokens, finished requests and good requests a second, from the first intended time to the last "
        "token or finished answer.",
    ),
    ("Hit rate", "Cached / prompt tokens, as the server says, of the requests for which it says both."),
    (
        "Lateness",
        f"How much later than intended requests left the tester. At a p99 over {format_duration(MAX_LATENESS_S)} the "
        "tester itself was too slow for the load.",
    ),
    (
        "Ledger",
        "Checked from outside: accepted requests ended in exactly one way, delivered tokens equal metered ones, "
        "repeated answers are the same.",
    ),
    ("Warm-up", "Requests intended before its end are made, and left out of everything but the ledger."),
)


def define_terms(targets: Targets) -> tuple[tuple[str, str], ...]:
    """Each term with its meaning, in the order of the page; goodput is by the run's own targets."""
    goodput = (
        f"Finished requests with TTFT ≤ {format_duration(targets.ttft_s)} and TPOT ≤ "
        f"{format_duration(targets.tpot_s)}, of all but those that we cancelled in time. Failed, shed and unfinished "
        "requests are misses; so is one that we hung up on after the TTFT target had passed, and an answer without a "
        "token. An answer that was not streamed has both targets together: TTFT + TPOT for every token but the "
        "first."
    )
    return (("Goodput", goodput), *TERMS)
