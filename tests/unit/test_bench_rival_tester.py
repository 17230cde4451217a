"""bench.support.rival_tester: what a recorded export of aiperf 0.13 says (two chats of 8 tokens, from a server told 150
ms and 20 ms a token)."""

from pathlib import Path

import msgspec
import pytest

from bench.support.rival_tester import Load, configuration, read_export

EXPORT = Path(__file__).with_name("aiperf_export.jsonl")


def test_an_export_gives_times_in_seconds_and_tokens() -> None:
    first, second = read_export(EXPORT)

    assert (first.ttft_s, first.tpot_s, first.tokens) == pytest.approx((0.159028125, 0.01975105357, 8))
    assert first.last_s - first.sent_s == pytest.approx(first.ttft_s + 7 * first.tpot_s, abs=1e-6)
    assert second.sent_s - first.sent_s == pytest.approx(0.0046, abs=1e-4)


def test_a_request_that_failed_is_not_passed_over(tmp_path: Path) -> None:
    failed = (
        b'{"metadata":{"request_start_ns":1,"request_end_ns":1},"metrics":{},'
        b'"error":{"code":404,"type":"Not Found","message":"no such model"}}\n'
    )
    path = tmp_path / "export.jsonl"
    path.write_bytes(EXPORT.read_bytes() + failed)

    with pytest.raises(
        RuntimeError, match=r"export.jsonl, line 3: aiperf says that the request failed: .*no such model"
    ):
        read_export(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_bytes(EXPORT.read_bytes().replace(b'"inter_token_latency"', b'"token_latency"'))

    with pytest.raises(RuntimeError, match=r"line 1 is not what aiperf 0.13 exports"):
        read_export(path)


def test_times_in_another_unit_are_refused(tmp_path: Path) -> None:
    lines = [msgspec.json.decode(line) for line in EXPORT.read_bytes().splitlines()]
    lines[1]["metrics"]["inter_token_latency"]["unit"] = "ns"
    path = tmp_path / "export.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))

    with pytest.raises(RuntimeError, match=r"line 2: times are not in ms"):
        read_export(path)


def test_a_load_becomes_evenly_spaced_or_concurrent_requests() -> None:
    paces = []
    for load in (Load("", requests=5, output_tokens=8, rate=2.0), Load("", requests=5, output_tokens=8, at_once=3)):
        content = configuration(
            load,
            url="u",
            model="m",
            prompts=Path("p"),
            tokenizer=Path("t"),
            folder=Path("f"),
            fields={"temperature": 0},
        )
        settings = msgspec.json.decode(msgspec.json.encode(content["benchmark"]))
        assert settings["endpoint"]["extra"] == {"max_tokens": 8, "temperature": 0}
        paces.append(settings["phases"])

    assert paces == [
        [{"name": "profiling", "type": "constant", "requests": 5, "rate": 2.0}],
        [{"name": "profiling", "type": "constant", "requests": 5, "rate": 200.0, "concurrency": 3}],
    ]
