"""`penstock train-drafter`: its options, its progress, and what the head has learned."""

import time
from pathlib import Path

from rich.console import Console

from penstock.workers.drafter_training.training import Plan, Progress, train_drafter

SHOWN_EVERY_S = 10.0
NAMES = {
    "prompts": "prompts that the model makes up",
    "answers": "answers of the model",
    "features": "answers whose features are there",
    "training": "steps of the training",
}


class _Shown:
    """A line every few seconds, and one whenever a phase begins or ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._shown_s = 0.0
        self._begin_s, self._first = 0.0, 0

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase == "done":
            self._print(
                f"trained on {progress.trained_tokens:,} tokens of answers in {progress.seconds / 60:.0f} minutes: "
                + _describe(progress)
            )
            return
        if progress.phase != self._phase:
            self._phase, self._begin_s, self._first = progress.phase, now_s, progress.done
        elif now_s - self._shown_s < SHOWN_EVERY_S and progress.done < progress.total:
            return
        self._shown_s = now_s
        text = f"{progress.done:,} of {progress.total:,} {NAMES[progress.phase]}"
        made = progress.done - self._first
        if made and progress.done < progress.total:
            left_s = (now_s - self._begin_s) / made * (progress.total - progress.done)
            text += f", {left_s / 60:.0f} minutes left at this rate"
        if progress.phase == "training":
            text += f", loss {progress.loss:.3f}" if progress.loss else f", {_describe(progress)}"
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def train(plan: Plan, console: Console) -> None:
    """Make the head, or go on with it, and say where it is. Raises ConfigError."""
    path = train_drafter(plan, _Shown(console).show)
    console.print(
        f"{path} is ready. In penstock.yaml, under the pool's engine: "
        f"speculation: {{method: head, head: {_name(path)}}}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _describe(progress: Progress) -> str:
    parts = ", ".join(f"{100 * share:.1f} %" for share in progress.kept)
    return (
        f"of answers held out, a draft of {len(progress.kept)} keeps {progress.kept_tokens:.2f} tokens ({parts}), "
        f"loss {progress.held_out_loss:.3f}"
    )


def _name(path: Path) -> Path:
    return path.absolute()
