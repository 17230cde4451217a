from penstock.cli.driver import failure
from penstock.cli.events import FAILED, Event


def test_a_refusal_of_ours_is_the_sentence_without_serves_traceback() -> None:
    reasons = (
        "Deploying failed\nTraceback ...\npenstock.base.errors.ConfigError: engine.timed.table: x is no step table\n"
    )

    assert failure("pool-a", reasons) == Event(
        FAILED, "pool-a could not be started: engine.timed.table: x is no step table"
    )


def test_anything_else_is_the_end_of_what_serve_says() -> None:
    failed = failure("pool-a", "\n".join(f"line {i}" for i in range(40)))

    assert failed.message == "pool-a could not be started."
    assert failed.detail.splitlines() == [f"line {i}" for i in range(25, 40)]
