import gzip
import json
import tracemalloc
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock_loadtest.errors import ScenarioInvalid, TraceInvalid
from penstock_loadtest.scenario import Trace
from penstock_loadtest.workload.trace_row import UNSHARED
from penstock_loadtest.workload.traces import read_azure, read_burstgpt, read_mooncake, read_trace

MOONCAKE = {"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [3, 4, 5]}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,110,27\n2023-11-16 18:18:04.0319600,7,3\n"
)
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,aa,43,GPT-4,906,446,1352,Conversation log
19440161.0,bb,2,ChatGPT,36,29,65,Conversation log
19440192.0,aa,3,GPT-4,1400,40,1440,Conversation log
19440200.0,,3,GPT-4,50,40,90,API log
"""


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def mooncake(tmp_path: Path, *changes: dict[str, Any]) -> Path:
    return written(tmp_path, "".join(json.dumps(MOONCAKE | change) + "\n" for change in changes), "trace.jsonl")


def test_a_mooncake_line_is_a_row_with_its_time_in_seconds(tmp_path: Path) -> None:
    (row,) = read_mooncake(mooncake(tmp_path, {}))

    assert (row.at_s, row.prompt_tokens, row.output_tokens, row.hash_ids, row.block_tokens) == (
        1.0,
        1100,
        9,
        [3, 4, 5],
        512,
    )


def test_blocks_that_a_trace_has_not_hashed_get_ids_that_no_other_row_has(tmp_path: Path) -> None:
    rows = list(read_mooncake(mooncake(tmp_path, {"hash_ids": [3]}, {"hash_ids": [3]}, {"hash_ids": []})))

    assert all(len(row.hash_ids or ()) == 3 for row in rows)
    assert [row.hash_ids[0] for row in rows[:2] if row.hash_ids] == [3, 3]
    own = [name for row in rows for name in row.hash_ids or () if name >= UNSHARED]
    assert len(own) == len(set(own)) == 7


def test_a_line_with_a_chat_id_is_bailians_with_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    (row,) = read_mooncake(
        mooncake(tmp_path, {"chat_id": 159, "parent_chat_id": -1, "turn": 1, "timestamp": 61.114, "input_length": 33})
    )

    assert (row.at_s, row.block_tokens, row.hash_ids) == (61.114, 16, [3, 4, 5])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"timestamp": "soon"}, "Expected `float`, got `str`"),
        ({"timestamp": -1}, "Expected `float` >= 0"),
        ({"input_length": -5}, "Expected `int` >= 0"),
        ({"input_length": 10**12}, "Expected `int` <= 10000000"),
        ({"input_length": 1.5}, "Expected `int`, got `float`"),
        ({"hash_ids": [1, None]}, "Expected `int`, got `null`"),
        ({"hash_ids": [-1]}, "Expected `int` >= 0"),
        ({"hash_ids": [1, 2, 3, 4]}, "4 hash_ids where 1100 tokens fill 3 blocks of 512"),
        ({"timestamp": 0}, "the time runs back by 1.5 s"),
    ],
)
def test_an_unreadable_mooncake_line_is_reported_with_file_and_line(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = mooncake(tmp_path, {}, {"timestamp": 1500}, change)

    with pytest.raises(TraceInvalid) as caught:
        list(read_mooncake(path))

    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize("line", ["{", '{"timestamp": NaN}', "[]", '{"timestamp": 1}', "\udcff"])
def test_a_line_that_is_no_mooncake_json_is_reported_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE) + "\n" + line + "\n", errors="surrogateescape")

    with pytest.raises(TraceInvalid, match=r"trace.jsonl, line 2: "):
        list(read_mooncake(path))


def test_rows_are_read_only_as_they_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(MOONCAKE) + "\nnonsense\n", "trace.jsonl")

    assert next(read_trace(Trace(format="mooncake", path=path))).prompt_tokens == 1100


def test_azure_times_count_from_the_first_row(tmp_path: Path) -> None:
    rows = list(read_azure(written(tmp_path, AZURE)))

    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0, 4808, 10),
        (0.052, 110, 27),
        (60.052, 7, 3),
    ]
    assert rows[0].hash_ids is None


def test_azures_newer_files_have_a_time_zone_or_a_further_column(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00+00:00,0,5,6\n"
        "2024-05-10 00:00:00.5+00:00,2,7,8\n"
    )

    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in read_azure(written(tmp_path, text))] == [
        (0, 5, 6),
        (0.5, 7, 8),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("yesterday,1,2", "TIMESTAMP is 'yesterday', not a time like"),
        ("2023-11-16 18:18:05,1", "2 fields where the header has 3"),
        ("2023-11-16 18:18:05,-1,2", "ContextTokens is '-1'"),
        ("2023-11-16 18:18:05,1,nan", "GeneratedTokens is 'nan'"),
        ("2023-11-16 18:17:05,1,2", "the time runs back by 59.032 s"),
    ],
)
def test_an_unreadable_azure_line_is_reported_with_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, AZURE + line + "\n")

    with pytest.raises(TraceInvalid) as caught:
        list(read_azure(path))

    assert str(caught.value).startswith(f"{path}, line 5: ")
    assert problem in str(caught.value)


def test_rows_that_are_a_little_out_of_order_leave_with_the_row_before_them(tmp_path: Path) -> None:
    rows = list(
        read_azure(written(tmp_path, AZURE + "2023-11-16 18:18:03.5319600,1,2\n2023-11-16 18:18:05.9799600,3,4\n"))
    )

    assert [row.at_s for row in rows[2:]] == [60.052, 60.052, 62]


def test_burstgpt_rows_count_from_the_first_and_failed_ones_are_left_out(tmp_path: Path) -> None:
    rows = list(read_burstgpt(written(tmp_path, BURSTGPT)))

    assert [(row.at_s, row.prompt_tokens, row.output_tokens, row.model, row.session) for row in rows] == [
        (0, 472, 18, "ChatGPT", None),
        (113, 417, 276, "GPT-4", None),
    ]


def test_burstgpts_newer_files_have_sessions_whose_turns_are_counted(tmp_path: Path) -> None:
    rows = list(read_burstgpt(written(tmp_path, BURSTGPT_SESSIONS)))

    assert [(row.at_s, row.session, row.turn) for row in rows] == [
        (0, "aa", 0),
        (51, "bb", 0),
        (82, "aa", 1),
        (90, None, 0),
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (BURSTGPT.replace("Request tokens", "Prompt tokens"), "line 1: the header lacks Request tokens"),
        (BURSTGPT + "119,GPT-4,417,276,693\n", "line 5: 5 fields where the header has 6"),
        (BURSTGPT + "inf,GPT-4,417,276,693,API log\n", "line 5: Timestamp is 'inf'"),
        (BURSTGPT + "3,GPT-4,417,276,693,API log\n", "line 5: the time runs back by 115 s"),
    ],
)
def test_an_unreadable_burstgpt_file_is_reported_with_file_and_line(tmp_path: Path, text: str, place: str) -> None:
    path = written(tmp_path, text)

    with pytest.raises(TraceInvalid) as caught:
        list(read_burstgpt(path))

    assert str(caught.value).startswith(f"{path}, {place}")


def test_a_part_of_a_trace_is_replayed_from_zero_at_another_speed(tmp_path: Path) -> None:
    trace = Trace(format="burstgpt", path=written(tmp_path, BURSTGPT_SESSIONS), start_s=50, end_s=90, time_scale=0.5)

    assert [row.at_s for row in read_trace(trace)] == [0.5, 16]


def test_lengths_are_scaled_rounded_cut_and_never_0(tmp_path: Path) -> None:
    trace = Trace(
        format="azure", path=written(tmp_path, AZURE), token_scale=0.1, max_prompt_tokens=300, max_output_tokens=2
    )

    assert [(row.prompt_tokens, row.output_tokens) for row in read_trace(trace)] == [(300, 1), (11, 2), (1, 1)]


def test_scaled_blocks_begin_where_they_begin_in_every_other_prompt(tmp_path: Path) -> None:
    path = mooncake(tmp_path, {}, {"input_length": 1024 + 512}, {"input_length": 1025})

    rows = list(read_trace(Trace(format="mooncake", path=path, token_scale=0.1)))

    assert [(row.block_tokens, row.prompt_tokens, row.hash_ids) for row in rows] == [
        (51, 102 + 8, [3, 4, 5]),
        (51, 153, [3, 4, 5]),
        (51, 103, [3, 4, 5]),
    ]


def test_a_cut_prompt_keeps_the_ids_of_the_blocks_that_are_left(tmp_path: Path) -> None:
    path = mooncake(tmp_path, {})

    rows = [next(read_trace(Trace(format="mooncake", path=path, max_prompt_tokens=cut))) for cut in (1, 512, 513, 5000)]

    assert [(row.prompt_tokens, row.hash_ids) for row in rows] == [
        (1, [3]),
        (512, [3]),
        (513, [3, 4]),
        (1100, [3, 4, 5]),
    ]


def test_a_part_without_a_request_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match=r"trace.csv has no request between 60.1 s and 70 s after its first row"):
        list(read_trace(Trace(format="azure", path=written(tmp_path, AZURE), start_s=60.1, end_s=70)))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("servegen", "t_s,client,input_tokens,output_tokens\n7200,1,9,9\n7201.5,1,9,9\n7260,1,9,9\n"),
        (
            "mooncake",
            "".join(
                f'{{"timestamp": {at_ms}, "input_length": 9, "output_length": 9, "hash_ids": []}}\n'
                for at_ms in (7200000, 7201500, 7260000)
            ),
        ),
    ],
)
def test_a_trace_counts_from_its_own_first_row(tmp_path: Path, form: Any, text: str) -> None:
    path = written(tmp_path, text)

    whole = [row.at_s for row in read_trace(Trace(format=form, path=path))]
    part = [row.at_s for row in read_trace(Trace(format=form, path=path, start_s=1.0, end_s=60.0))]

    assert whole == [0.0, 1.5, 60.0]
    assert part == [0.5]


def test_a_rate_is_refused_where_there_are_no_client_rates(tmp_path: Path) -> None:
    path = written(tmp_path, "t_s,client,input_tokens,output_tokens\n1,2,3,4\n")

    with pytest.raises(
        ScenarioInvalid, match=r"trace.rate is for ServeGen's client rates, which .*trace.csv does not hold"
    ):
        list(read_trace(Trace(format="servegen", path=path, rate=2)))


@pytest.mark.parametrize(("name", "rows", "end_s"), [("conversation", 7851, 2397), ("synthetic", 2597, 679.705)])
def test_the_real_mooncake_traces_are_read_whole(data_dir: Path, name: str, rows: int, end_s: float) -> None:
    read = list(read_trace(Trace(format="mooncake", path=data_dir / "mooncake" / f"{name}_trace.jsonl")))

    assert (len(read), read[-1].at_s) == (rows, end_s)
    assert all(row.hash_ids and row.hash_ids[-1] < UNSHARED for row in read)


@pytest.mark.parametrize(("name", "rows", "prompt", "output"), [("code", 7148, 2028, 27), ("conv", 13828, 1203, 201)])
def test_the_real_azure_traces_are_read_whole(data_dir: Path, name: str, rows: int, prompt: int, output: int) -> None:
    read = list(
        read_trace(Trace(format="azure", path=data_dir / "azure_llm_2023" / f"AzureLLMInferenceTrace_{name}.csv"))
    )

    assert len(read) == rows
    assert sum(row.prompt_tokens for row in read) / rows == pytest.approx(prompt, abs=25)
    assert sum(row.output_tokens for row in read) / rows == pytest.approx(output, abs=11)
    assert all(a.at_s <= b.at_s for a, b in pairwise(read))


def test_a_real_burst_of_servegens_requests_is_read(data_dir: Path) -> None:
    path = data_dir / "servegen" / "reason_deepseek-r1_requests_4rps.csv.gz"

    read = list(islice(read_trace(Trace(format="servegen", path=path)), 1000))

    assert (read[0].at_s, read[0].client, read[0].prompt_tokens, read[0].output_tokens) == (0.0, "66", 30, 4178)
    assert len(read) == 1000


@pytest.fixture
def long_trace(tmp_path: Path) -> Path:
    """A gzip trace of 200,000 rows."""
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("t_s,client,input_tokens,output_tokens\n")
        file.writelines(f"{row / 100},7,{row % 1000},5\n" for row in range(200_000))
    return path


def test_memory_does_not_grow_with_the_rows_read(long_trace: Path) -> None:
    rows = read_trace(Trace(format="servegen", path=long_trace))
    next(rows)
    tracemalloc.start()
    try:
        for _ in islice(rows, 20_000):
            pass
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size < 100_000
