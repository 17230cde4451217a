"""`penstock tiers tune`: prompts answered by an edge's model and a cloud's, and the threshold for what is wanted.

Asking is `checkpoint` or `server`, the sums are `curve`; here are progress, files and sentences. Everything lies in one
folder: answers.jsonl, to which answers are added as they come, and what is made of them anew each time: curve.csv,
curve.png, escalation.yaml.
"""

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.cli.tiers.curve import (
    Match,
    Pair,
    Point,
    Prices,
    area_above_random,
    draw_curve,
    interval,
    largest_area,
    pair_of,
    propose_for_agreement,
    propose_for_share,
)
from penstock.cli.tiers.questions import CLOUD, EDGE, Answer, KeptAnswers, Question, read_questions
from penstock.cli.tiers.server import Server, ask_server
from penstock.text.source import resolve

TOKENS_AS_PRICE = Prices(1.0, 1.0)
"""Prices where none are given: a request costs its tokens, in millions."""
SHOWN_EVERY_S = 10.0
SHOWN_SHARES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be tuned, and how."""

    prompts: Path
    edge: str
    """Checkpoint, or with `server` a served name; so is `cloud`."""
    cloud: str
    out: Path
    num_tokens: int
    """First tokens that are judged."""
    max_tokens: int
    """Longest answer."""
    agreement: float | None
    """Wanted share of requests with the cloud's final answer; None: `share` is wanted."""
    share: float | None
    """Wanted share of requests that are sent on."""
    match: Match
    server: Server | None
    threads: int | None
    edge_prices: Prices | None
    cloud_prices: Prices | None

    @property
    def models(self) -> dict[str, str]:
        """Checkpoint or served name by place."""
        return {EDGE: self.edge, CLOUD: self.cloud}


def tune(plan: Plan, console: Console) -> None:
    """Ask, draw and propose. Raises ConfigError with a sentence, EngineFault."""
    _check(plan)
    questions = read_questions(plan.prompts)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        kept = KeptAnswers(plan.out / "answers.jsonl")
        identities = {place: _identify(plan, model) for place, model in plan.models.items()}
        for place, identity in identities.items():
            _ask(plan, place, identity, questions, kept, console)
        pairs = pair_answers(plan, identities, questions, kept)
        points = draw_curve(pairs)
        chosen = propose(plan, points)
        write_csv(plan.out / "curve.csv", points)
        write_rule(plan, chosen, len(pairs))
        plot(plan.out / "curve.png", points, chosen, cost_name(plan))
    except OSError as error:
        raise ConfigError(f"{plan.out} can't be written: {error}") from error
    _show(plan, pairs, points, chosen, console)


def _check(plan: Plan) -> None:
    for name, wanted in (("--agreement", plan.agreement), ("--share", plan.share)):
        if wanted is not None and not 0 <= wanted <= 1:
            raise ConfigError(f"{name} is a share between 0 and 1, not {wanted}")
    if (plan.agreement is None) == (plan.share is None):
        raise ConfigError("one of --agreement and --share says what is wanted; give one of them")
    if (plan.edge_prices is None) != (plan.cloud_prices is None):
        raise ConfigError("--edge-price and --cloud-price belong together; give both or neither")
    if plan.num_tokens > plan.max_tokens:
        raise ConfigError(f"--tokens ({plan.num_tokens}) must not exceed --max-tokens ({plan.max_tokens})")


def _identify(plan: Plan, model: str) -> str:
    """What stands for the model in kept answers."""
    return resolve(model).digest if plan.server is None else plan.server.identity(model)


def _ask(
    plan: Plan, place: str, identity: str, questions: Sequence[Question], kept: KeptAnswers, console: Console
) -> None:
    """Have the answers that are missing given."""
    model = plan.models[place]
    missing = kept.missing(place, identity, questions, plan.max_tokens)
    if not missing:
        _say(console, f"{place}: {model} has answered all {len(questions)} prompts already")
        return
    on_answer = _with_progress(console, place, len(questions) - len(missing), len(questions), kept.add)
    if plan.server is None:
        from penstock.cli.tiers.checkpoint import ask_checkpoint  # noqa: PLC0415 (torch takes seconds to import)

        num_passed = ask_checkpoint(model, place, missing, plan.max_tokens, plan.threads, on_answer)
    else:
        num_passed = ask_server(plan.server, model, place, missing, plan.max_tokens, on_answer)
    if num_passed:
        _say(console, f"{place}: {num_passed} prompts can't be read by {model}, and are left out")


def _with_progress(
    console: Console, place: str, num_done: int, num_all: int, take: Callable[[Answer], None]
) -> Callable[[Answer], None]:
    """The function, with a line every few seconds."""
    done, shown_s, began_s = num_done, 0.0, time.monotonic()

    def on_answer(answer: Answer) -> None:
        nonlocal done, shown_s
        take(answer)
        done += 1
        now_s = time.monotonic()
        if done < num_all and now_s - shown_s < SHOWN_EVERY_S:
            return
        shown_s = now_s
        left_s = (now_s - began_s) / (done - num_done) * (num_all - done)
        rest = f", {left_s / 60:.0f} minutes left at this rate" if done < num_all else ""
        _say(console, f"{place}: {done} of {num_all} answers{rest}")

    return on_answer


def pair_answers(
    plan: Plan, identities: Mapping[str, str], questions: Sequence[Question], kept: KeptAnswers
) -> list[Pair]:
    """The questions that both have answered. identities: by place, as in kept answers. Raises ConfigError where there
    is none."""
    prices = plan.edge_prices or TOKENS_AS_PRICE, plan.cloud_prices or TOKENS_AS_PRICE
    pairs = []
    for question in questions:
        edge, cloud = (kept.find(place, identities[place], question, plan.max_tokens) for place in (EDGE, CLOUD))
        if edge is not None and cloud is not None:
            pairs.append(pair_of(question, edge, cloud, plan.num_tokens, plan.match, *prices))
    if not pairs:
        raise ConfigError(f"no prompt of {plan.prompts} was answered by both models")
    return pairs


def propose(plan: Plan, points: Sequence[Point]) -> Point:
    if plan.agreement is not None:
        return propose_for_agreement(points, plan.agreement)
    assert plan.share is not None
    return propose_for_share(points, plan.share)


def write_csv(path: Path, points: Sequence[Point]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)


def write_rule(plan: Plan, chosen: Point, num_prompts: int) -> None:
    """The setting of the edge's pool, with what it was found by."""
    plan.out.joinpath("escalation.yaml").write_text(
        f"# found by penstock tiers tune with {num_prompts} prompts of {plan.prompts.name}: {100 * chosen.share:.1f} %"
        f" of them are sent on,\n# and {100 * chosen.agreement:.1f} % get the cloud model's final answer\n"
        f"escalation: {{tokens: {plan.num_tokens}, min_mean_logprob: {chosen.threshold:.6g}}}\n",
        encoding="utf-8",
    )


def cost_name(plan: Plan) -> str:
    return "millions of tokens a request" if plan.edge_prices is None else "cost of a request, at the prices given"


def plot(path: Path, points: Sequence[Point], chosen: Point | None, cost: str) -> None:
    """Agreement, and cost, against the share that is sent on."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and half a second that only this needs)
    except ImportError as error:
        raise ConfigError("the curve is drawn by matplotlib: pip install 'penstock[loadtest]'") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shares = [100 * point.share for point in points]
    left.step(shares, [100 * point.agreement for point in points], where="post", label="least sure first")
    left.plot([0, 100], [100 * points[0].agreement, 100], linestyle="--", color="grey", label="drawn at random")
    if any(point.accuracy is not None for point in points):
        left.step(shares, [100 * (point.accuracy or 0) for point in points], where="post", label="right by the labels")
    left.set_ylabel("% with the cloud model's final answer")
    right.step(shares, [point.cost for point in points], where="post")
    right.set_ylabel(cost)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("% sent on to the cloud")
        axes.grid(alpha=0.3)
        if chosen is not None:
            axes.axvline(100 * chosen.share, color="black", linewidth=0.8, label=f"below {chosen.threshold:.3g}")
    left.legend()
    figure.savefig(path, dpi=120)


def _show(plan: Plan, pairs: Sequence[Pair], points: Sequence[Point], chosen: Point, console: Console) -> None:
    table = Table(title=f"{len(pairs)} prompts, {plan.num_tokens} tokens judged")
    for name in ("sent on", "mean log probability below", "the cloud's answer", "at random", "right", "cost"):
        table.add_column(name, justify="right")
    base = points[0].agreement
    shown = dict.fromkeys(propose_for_share(points, share) for share in SHOWN_SHARES)
    for point in sorted({*shown, chosen}):
        table.add_row(
            f"{100 * point.share:.1f} %",
            f"{point.threshold:.4g}",
            f"{100 * point.agreement:.1f} %",
            f"{100 * (base + point.share * (1 - base)):.1f} %",
            "" if point.accuracy is None else f"{100 * point.accuracy:.1f} %",
            f"{point.cost:.4g}",
        )
    console.print(table)
    area, bounds = area_above_random(pairs), interval(pairs)
    _say(
        console,
        f"Area above random: {area:.4f}, with 95 % certainty in {bounds.low:.4f} to {bounds.high:.4f}; an order that"
        f" knew all would have {largest_area(pairs):.4f}.",
    )
    if bounds.low <= 0:
        _say(
            console,
            "That may be chance: with these prompts the edge model's doubt says nothing certain about its answers.",
        )
    _say(console, f"{plan.out / 'escalation.yaml'} has the rule, curve.png beside it the curve.")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
