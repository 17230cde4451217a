"""`penstock plan`: its options, and what is asked of whom."""

from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from rich.console import Console

from penstock.base.errors import ConfigError
from penstock.cli.plan.checkpoints import Found, find_model
from penstock.cli.plan.make import Machine, Plan, forms_on_machine, make_plan, to_tree
from penstock.cli.plan.measured import Measured, fetch_measured
from penstock.cli.plan.page import show_plan
from penstock.cli.plan.pool import render_values
from penstock.cli.plan.question import THIS_MACHINE, Question, check_number, find_context, parse_targets
from penstock.cli.plan.traces import read_load
from penstock.cli.refusals import refusing
from penstock.perf.planning.formats import Head
from penstock.perf.planning.loads import Load
from penstock.perf.planning.shape import parse_tokens


def plan(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint directory, GGUF file, hub id, demo, or a known model like llama-3-8b."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Instead: layers=80,hidden=8192,heads=64,kv_heads=8,head_dim=,inner= or params=,vocab=."),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Card, repeatable; cpu: this machine; without it, all of the table.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="Cards of each replica; without it 1, 2, 4 and 8 are tried.")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Tokens of a sequence, prompt and answer: 8192 or 8k; default: 8k, or the model's if fewer."),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Targets: ttft=1s,tpot=50ms.")] = None,
    load: Annotated[Path | None, typer.Option(help="Trace whose busiest minute is planned for.")] = None,
    rate: Annotated[float, typer.Option(help="Requests a second; 0: as many as a replica carries.", min=0)] = 0.0,
    prompt: Annotated[str, typer.Option("--input", help="Prompt tokens of a request.")] = "1024",
    output: Annotated[str, typer.Option(help="Output tokens of a request.")] = "256",
    cached: Annotated[float, typer.Option(help="Part of the prompts found in the cache.", min=0, max=0.99)] = 0.0,
    weights: Annotated[list[str] | None, typer.Option(help="bf16, fp8, int8, int4, exact4; repeatable.")] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="bf16; fp8 on a GPU that has it, int8 on a CPU; repeatable.")
    ] = None,
    lm_head: Annotated[str, typer.Option(help="Embedding and head: auto, keep, int8, int4.")] = "auto",
    adapters: Annotated[int, typer.Option(help="Slots for adapters.", min=0)] = 0,
    rank: Annotated[int, typer.Option(help="Their highest rank.", min=1)] = 32,
    draft: Annotated[str | None, typer.Option(help="Draft model, named like the model.")] = None,
    draft_head: Annotated[str | None, typer.Option(help="File of a draft head.")] = None,
    memory: Annotated[float | None, typer.Option(help="Memory of a card, GB, instead of the table's.")] = None,
    memory_share: Annotated[float, typer.Option(help="Part of it that a replica may take.")] = 0.9,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at once; default: the device's.", min=1)] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step; default: the device's.", min=1)
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Price of a card, or of this machine.", min=0)] = None,
    utilisation: Annotated[float, typer.Option(help="Part of the capacity that the tariff expects to be used.")] = 0.6,
    margin: Annotated[float, typer.Option(help="What the tariff adds to the cost, as a part of it.")] = 0.2,
    measured: Annotated[
        str | None, typer.Option(help="Gateway's URL (admin port): its replicas' step times, not the roofline.")
    ] = None,
    pool: Annotated[str | None, typer.Option(help="Of --measured: which pool.")] = None,
    simulate: Annotated[
        Path | None, typer.Option(help="Simulate the load on what is proposed; the run is left in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    helm: Annotated[bool, typer.Option("--helm", help="Values of the proposed pool, for the chart.")] = False,
) -> None:
    """Say what fits on which card, how fast it is and what it costs, from a checkpoint's configuration alone."""
    with refusing():
        if lm_head not in get_args(Head):
            raise ConfigError(f"--lm-head {lm_head} is none of {', '.join(get_args(Head))}")
        check_number("cached", cached, 0, 0.99)
        prompt_tokens, output_tokens = parse_tokens(prompt, "--input"), parse_tokens(output, "--output")
        asked = None if context is None else parse_tokens(context)
        found = find_model(model, shape, lm_head)  # type: ignore[arg-type]  # checked above
        context_tokens = find_context(asked, 0 if load else prompt_tokens + output_tokens, found.shape)
        wanted, notes = _find_load(load, rate, prompt_tokens, output_tokens, cached, context_tokens)
        question = Question(
            tuple(gpu or ()),
            count,
            context_tokens,
            parse_targets(slo),
            wanted,
            forms=tuple(weights or ()),
            kvs=tuple(kv or ()),
            head=lm_head,
            adapter_slots=adapters,
            adapter_rank=rank,
            draft=draft,
            draft_head=draft_head,
            memory_share=memory_share,
            memory_gb=memory,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            price_per_hour=price_per_hour,
            utilisation=utilisation,
            margin=margin,
        )
        costs = None if measured is None else _fetch(measured, pool, question)
        made = make_plan(question, found, _measure_machine(question, found), costs)
        if helm:
            print(render_values(made), end="")
            return
        sentence = None if simulate is None else _simulate(made, load, simulate)
        if as_json:
            tree = {**to_tree(made), "notes": notes, "simulated": sentence}
            print(msgspec.json.format(msgspec.json.encode(tree)).decode())
            return
        console = Console()
        show_plan(made, console)
        for note in [*notes, *([] if sentence is None else [sentence])]:
            console.print(note, highlight=False, markup=False)


def _find_load(
    trace: Path | None, rate: float, prompt: int, output: int, cached: float, context_tokens: int
) -> tuple[Load, list[str]]:
    """The load, and notes on where it is from."""
    if trace is None:
        return Load(rate, prompt * (1 - cached), output, prompt * cached), []
    found = read_load(trace, context_tokens, cached)
    notes = [
        f"{trace.name}: {found.num_requests} requests, {found.mean_rps:.3g} a second, {found.load.rate_rps:.3g} in the "
        f"busiest minute, which is planned for; {found.num_too_long} are longer than the context and left out."
    ]
    if found.hit_share is not None:
        notes.append(
            f"One cache that forgets nothing would have {100 * found.hit_share:.0f} % of its prompts' blocks; "
            f"--cached {found.hit_share:.2f} plans with that, {cached:g} was planned with."
        )
    return found.load, notes


def _fetch(url: str, pool: str | None, question: Question) -> Measured:
    """Costs of what runs hold for what runs: one card, one format."""
    if len(question.gpus) != 1 or len(question.forms) != 1:
        raise ConfigError(
            "--measured has the step times of one machine and one format: name both, by --gpu and --weights, as they "
            "are there"
        )
    return fetch_measured(url, pool)


def _measure_machine(question: Question, found: Found) -> Machine | None:
    if THIS_MACHINE not in question.gpus:
        return None
    from penstock.cli.plan.machine import measure_machine  # noqa: PLC0415 (torch takes seconds to import)

    return measure_machine(found.shape, forms_on_machine(question, found), found.head)


def _simulate(made: Plan, trace: Path | None, out: Path) -> str:
    from penstock.cli.plan.simulated import describe, simulate_plan  # noqa: PLC0415 (Ray takes seconds to import)

    assert made.best is None or made.best.replicas is not None
    found = simulate_plan(made, trace, out)
    return describe(found, 1 if made.best is None else made.best.replicas or 1)
