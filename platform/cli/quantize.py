"""`penstock quantize`: its options, its progress, and the table of what quantizing cost."""

import gzip
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.base.errors import ConfigError
from penstock.workers.quant.quantize import Method, Plan, model_perplexity, quantize_checkpoint

FIELDS = ("prompt", "text", "question", "turns")
"""Of a JSON line: the first that is there."""


def quantize(model: str, out: Path, calibration: Path, evaluation: Path | None, *, group_size: int, sequences: int, method: Method, console: Console) -> None:
    """Raises ConfigError. evaluation: text whose perplexity is printed before and after; None: none is."""
    text = read_text(calibration)
    held_out = None if evaluation is None else read_text(evaluation)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"quantizing {model}", total=None)
        quantize_checkpoint(Plan(model, out, text, group_size, sequences, method), lambda done, total: progress.update(task, completed=done, total=total))
    console.print(f"{out} is ready: name it as a pool's model.", highlight=False)
    if held_out is not None:
        console.print(_perplexities({model: model, str(out): str(out)}, held_out, console))


def _perplexities(models: dict[str, str], text: str, console: Console, max_tokens: int = 16384) -> Table:
    table = Table(title="perplexity")
    table.add_column("checkpoint")
    table.add_column("bfloat16", justify="right")
    for name, model in models.items():
        with console.status(f"reading with {name}"):
            table.add_row(name, f"{model_perplexity(model, text, max_tokens):.3f}")
    return table


def read_text(path: Path) -> str:
    """Plain text, or the texts of JSON lines, one behind the other; gzip by its name. Raises ConfigError that names file and line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    if ".jsonl" not in path.suffixes:
        return text
    return "\n\n".join(_texts_of(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _texts_of(path: Path, number: int, line: str) -> str:
    try:
        row = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error
    found = next((row[name] for name in FIELDS if name in row), None)
    texts = found if isinstance(found, list) else [found]
    if not all(isinstance(item, str) for item in texts):
        raise ConfigError(f"{path}, line {number}: none of the fields {', '.join(FIELDS)} holds text")
    return "\n\n".join(map(str, texts))
