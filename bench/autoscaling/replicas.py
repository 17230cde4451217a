"""The replicas that are simulated, what is in target on them, and the least that a request takes of one.

Of the class of an 8B model on an A10, **assumed and not measured**: 2,500 prompt tokens a second, steps of 22 ms and
0.8 ms a row, 32 rows, 60 s to start (+- 30 %). Prompts are computed in pieces of 256 tokens: a step with such a piece
and 32 rows takes the time a token may take. With longer ones an answer of two tokens is late wherever a prompt is
computed beside it, however many replicas there are.
"""

import math
from typing import Final

from penstock.workers.config import EngineConfig, TimedConfig

PROMPT_TOKENS_S: Final = 2500.0
TTFT_S, TPOT_S = 2.0, 0.15
START_S: Final = 60.0
MAX_ROWS: Final = 32
PIECE_TOKENS: Final = 256
BASE_S, ROW_S = 0.022, 0.0008
MOST: Final = 100
"""Most replicas that an autoscaler may ask for."""
ENGINE: Final = EngineConfig(
    runner="timed",
    max_num_seqs=MAX_ROWS,
    max_batched_tokens=PIECE_TOKENS,
    timed=TimedConfig(
        base_s=BASE_S, row_s=ROW_S, prefill_token_s=1 / PROMPT_TOKENS_S, num_blocks=6000, max_model_len=32768
    ),
)


def work_s(prompt_tokens: int, output_tokens: int) -> float:
    """Seconds of a replica that a request takes at the least: beside 31 others in each of its steps."""
    return prompt_tokens / PROMPT_TOKENS_S + output_tokens * (ROW_S + BASE_S / MAX_ROWS)


def alone_s(prompt_tokens: int) -> float:
    """Seconds until the first token on a replica that has nothing else to do and no part of the prompt."""
    return prompt_tokens / PROMPT_TOKENS_S + math.ceil(prompt_tokens / PIECE_TOKENS) * BASE_S


def is_in_target(prompt_tokens: int, at_s: float, token_times_s: list[float]) -> bool:
    """Whether an answer came in time: the first token within TTFT_S and what the prompt takes alone, the others within
    TPOT_S each, on the average. token_times_s: of the whole answer, in order; empty is too late."""
    if not token_times_s:
        return False
    first_s = token_times_s[0]
    if first_s - at_s > TTFT_S + alone_s(prompt_tokens):
        return False
    return (token_times_s[-1] - first_s) <= TPOT_S * (len(token_times_s) - 1)


def bound_hours(requests: list[tuple[int, int]], attained: float) -> float:
    """Replica-hours below which no autoscaler gets that part of the requests in target: the least work of the cheapest
    of them, as if replicas came and went at once. requests: prompt and output tokens of each."""
    works_s = sorted(work_s(prompt, output) for prompt, output in requests)
    return sum(works_s[: math.ceil(attained * len(works_s))]) / 3600
