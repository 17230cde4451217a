"""Conversations by the load tester's sessions, routed by ours and pinned to replicas by hand, in turn.

Each turn sends the real answers before it; the replicas answer in words whose text tokenizes back, so that all of a
conversation but its last turn can be found in the cache of the replica that had it.
"""

from typing import Final

from penstock_loadtest.scenario import Arrivals, Kind, Lengths, Prompts, Scenario, Sessions

GROUPS: Final = 16
SHARED_TOKENS: Final = (0, 200)
"""Tokens that first prompts of the same group share."""
OWN_TOKENS: Final = 100
SESSIONS_S: Final = 2.4
"""Sessions a second."""
LOAD_S, QUICK_LOAD_S = 45.0, 10.0
"""Seconds in which sessions begin."""
LAST_S: Final = 40.0
"""Longest time that sessions go on behind the last that begins."""
WANTED_SHARE: Final = 0.97
WANTED_TTFT: Final = 1.05


def make_scenario(shared_tokens: int, seed: int, seconds: float) -> Scenario:
    """The load. Turns behind its duration are not sent, so that it is longer than sessions begin."""
    return Scenario(
        name="reuse",
        seed=seed,
        duration_s=None,
        requests=round(SESSIONS_S * seconds) * 5,
        drain_s=LAST_S,
        arrivals=Arrivals(rate=SESSIONS_S),
        kinds=[
            Kind(
                name="conversation",
                sessions=Sessions(turns=Lengths(constant=5), think_s=Lengths(uniform=(0.5, 2.0))),
                prompts=Prompts(
                    tokens=Lengths(uniform=(shared_tokens + 40, shared_tokens + OWN_TOKENS)),
                    shared_prefix_tokens=shared_tokens,
                    prefix_groups=GROUPS,
                ),
                output_tokens=Lengths(uniform=(24, 72)),
                ignore_eos=True,
            )
        ],
    )
