"""Mooncake's conversations through the platform: what share of the prompts four replicas' caches have, beside one cache
of their total size.

The caches hold together half of what the window's prompts fill. The one cache is computed offline, over the same
prompts in the same order, and holds no answers; the replicas' caches hold those too.
"""

from pathlib import Path
from typing import Final, NamedTuple

from bench.autoscaling.replicas import TTFT_S
from bench.routing.loads import BLOCK, FILES, TOKEN_SCALE
from bench.routing_live.cache import Prompt, count_blocks, make_prompt, measure_share
from bench.routing_live.live_platform import NUM_REPLICAS, LivePlatform, Run
from penstock_loadtest.planned import Planned
from penstock_loadtest.scenario import Kind, Prompts, Scenario, Targets, Trace
from penstock_loadtest.workload.plan import draw_plan

WINDOW_S: Final = 180.0
QUICK_WINDOW_S: Final = 40.0
DRAIN_S: Final = 60.0
CACHED_PART: Final = 0.5
"""Size of all caches, as a part of what the window fills."""
WANTED: Final = 0.95


class Window(NamedTuple):
    """A window of the trace, and what offline caches make of it."""

    scenario: Scenario
    num_blocks: int
    """KV blocks of each replica."""
    endless: float
    """Share of the prompts' tokens that a cache that forgets nothing has."""
    one_cache: float
    """The same of one cache of the replicas' total size."""


def read_window(folder: Path, seconds: float) -> Window:
    """The first so many seconds of the trace, at its own pace."""
    scenario = Scenario(
        name="mooncake",
        duration_s=None,
        drain_s=DRAIN_S,
        trace=Trace(format="mooncake", path=folder / FILES["conversation"], token_scale=TOKEN_SCALE, end_s=seconds),
        kinds=[Kind(endpoint="completions", prompts=Prompts(source="tokens"), ignore_eos=True)],
        targets=Targets(ttft_s=TTFT_S),
    )
    prompts = [_read(planned) for planned in draw_plan(scenario)]
    num_blocks = round(CACHED_PART * count_blocks(prompts) / NUM_REPLICAS)
    return Window(
        scenario,
        num_blocks,
        measure_share(prompts, BLOCK, None),
        measure_share(prompts, BLOCK, NUM_REPLICAS * num_blocks),
    )


def play_window(platform: LivePlatform, window: Window) -> Run:
    return platform.play(window.scenario, draw_plan(window.scenario))


def _read(planned: Planned) -> Prompt:
    assert isinstance(planned.prompt, list)
    return make_prompt(planned.prompt, BLOCK)
