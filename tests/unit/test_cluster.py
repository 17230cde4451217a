"""tests.cluster: where no cluster can be started, its tests are skipped, and with reasons that CI allows."""

from pathlib import Path

import pytest

from tests.cluster import ABSENT, running_cluster
from tests.skips import Skip, parse, unlisted

TESTS = Path(__file__).parents[1]
USERS = [
    path
    for path in TESTS.glob("integration/test_*.py")
    if "from tests.cluster import" in path.read_text(encoding="utf-8")
]


def skipped_because() -> str:
    with pytest.raises(pytest.skip.Exception) as skipped, running_cluster("--nodes", "fake"):
        raise AssertionError("there is no cluster")
    return str(skipped.value)


def test_without_a_program_or_with_one_that_fails_the_reason_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "cluster"
    program.write_text("#!/bin/sh\necho starting >&2\necho no openssl here >&2\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.delenv("PENSTOCK_TEST_CLUSTER", raising=False)
    unset = skipped_because()
    monkeypatch.setenv("PENSTOCK_TEST_CLUSTER", str(program))
    failed = skipped_because()

    with pytest.raises(AssertionError, match="no openssl here"), running_cluster("--nodes", "fake", must=True):
        pass
    assert (unset, failed) == (ABSENT, f"{ABSENT} here: no openssl here")
    allowed = parse((TESTS / "allowed_skips.txt").read_text(encoding="utf-8"))
    skips = [
        Skip(f"{path.relative_to(TESTS.parent)}::test_any", reason) for path in USERS for reason in (unset, failed)
    ]
    assert len(skips) >= 2
    assert unlisted(skips, allowed) == []
