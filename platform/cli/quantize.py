"""`penstock quantize`: its options, its progress, and the table of what quantizing cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.text.corpus import read_file, read_lines
from penstock.workers.compute.loading import compute_dtype
from penstock.workers.quantize.quantize import (
    Plan,
    evaluation_tokens,
    model_perplexity,
    plain_group_size,
    quantize_checkpoint,
)

EVALUATED_TOKENS = 16384


def quantize(
    model: str,
    out: Path,
    calibration: Path,
    evaluation: Path | None,
    *,
    group_size: int,
    sequences: int,
    console: Console,
) -> None:
    """Make the checkpoint `out` and print what it cost. Raises ConfigError. evaluation: text whose perplexity is
    printed, before and after, or None."""
    text = read_text(calibration)
    held_out = None if evaluation is None else evaluation_tokens(model, read_text(evaluation), EVALUATED_TOKENS)
    with _layers_shown(console) as on_layer:
        quantize_checkpoint(Plan(model, out, text, group_size, sequences), on_layer)
    plain = plain_group_size(model, group_size)
    if plain != group_size:
        other = "" if plain is None else f" With --group-size {plain}, whatever reads AutoAWQ's format takes it."
        console.print(
            f"Some rows end in a group shorter than {group_size}, which only Penstock reads.{other}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"{out} is ready: name it as a pool's model.", highlight=False, markup=False, soft_wrap=True)
    if held_out is None:
        return
    found, dtype = {}, compute_dtype("auto")
    for name, checkpoint, rounding in (
        (str(dtype).removeprefix("torch."), model, None),
        ("AWQ", str(out), None),
        ("round to nearest", model, group_size),
    ):
        with console.status(f"reading with {name}"):
            found[name] = model_perplexity(checkpoint, held_out, dtype, group_size=rounding)
    console.print(_perplexities(found, group_size))


@contextmanager
def _layers_shown(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, a line a layer elsewhere."""
    if not console.is_terminal:
        yield lambda done, total: console.print(f"layer {done} of {total}", highlight=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("layers quantized", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _perplexities(found: dict[str, float], group_size: int) -> Table:
    table = Table(title=f"perplexity, groups of {group_size}")
    table.add_column("weights")
    table.add_column("perplexity", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:.3f}")
    return table


def read_text(path: Path) -> str:
    """Plain text, or the texts of JSON lines, one behind the other. Raises ConfigError that names file and line."""
    if ".jsonl" not in path.suffixes:
        return read_file(path)
    return "\n\n".join(text for texts in read_lines(path) for text in texts)
