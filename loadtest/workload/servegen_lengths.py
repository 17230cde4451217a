"""ServeGen's table of lengths: for clients and windows of six hours the quantiles of prompts and answers, to draw
from."""

from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_loadtest.errors import TraceInvalid
from penstock_loadtest.workload.lines import MAX_TOKENS, make_line_error, read_json

QUANTILES: Final = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

Floats = npt.NDArray[np.float64]
Row = Annotated[list[Annotated[float, msgspec.Meta(ge=0, le=MAX_TOKENS)]], msgspec.Meta(min_length=15, max_length=15)]
"""A mean, then the 14 quantiles."""


class LengthLine(msgspec.Struct):
    t_s: Annotated[float, msgspec.Meta(ge=0)]
    client: Annotated[int, msgspec.Meta(ge=0)]
    output_tokens: Row
    input_tokens: Row | None = None
    text_tokens: Row | None = None  # multimodal workloads have these four in its place
    image_tokens: Row | None = None
    audio_tokens: Row | None = None
    video_tokens: Row | None = None

    @property
    def prompt_parts(self) -> list[Row]:
        """Parts of a prompt, whose tokens add up: what a model reads of an image counts as so much text."""
        parts = (self.input_tokens, self.text_tokens, self.image_tokens, self.audio_tokens, self.video_tokens)
        return [part for part in parts if part is not None]


class LengthTable:
    """The table; `lines` has at least one line, and those of a client in order of time."""

    def __init__(self, lines: dict[int, list[LengthLine]], seed: int) -> None:
        self._lines = lines
        self._clients = sorted(lines)
        self._seed = seed

    @classmethod
    def read(cls, path: Path, seed: int) -> Self:
        """The table of a file. Raises TraceInvalid."""
        lines: defaultdict[int, list[LengthLine]] = defaultdict(list)
        for number, line in read_json(path, msgspec.json.Decoder(LengthLine)):
            if not line.prompt_parts:
                raise make_line_error(path, number, "neither input_tokens nor text_tokens")
            if any(part[1:] != sorted(part[1:]) for part in (line.output_tokens, *line.prompt_parts)):
                raise make_line_error(path, number, "quantiles that fall")
            lines[line.client].append(line)
        if not lines:
            raise TraceInvalid(f"{path} is empty.")
        for of_client in lines.values():
            of_client.sort(key=lambda line: line.t_s)
        return cls(dict(lines), seed)

    def draw(self, t_s: float, client: int, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Prompt and output tokens of so many requests, whole numbers, drawn independently.

        From the client's line that holds at t_s, or its first one when that is later. Clients without a line use
        another one's, always the same.
        """
        lines = self._lines.get(client)
        if lines is None:
            lender = np.random.default_rng([self._seed, client]).integers(len(self._clients))
            lines = self._lines[self._clients[lender]]
        line = lines[max(0, bisect_right(lines, t_s, key=lambda line: line.t_s) - 1)]
        prompt = sum((_draw(part, count, rng) for part in line.prompt_parts), np.zeros(count))
        return np.rint(prompt), np.rint(_draw(line.output_tokens, count, rng))


def _draw(row: Row, count: int, rng: np.random.Generator) -> Floats:
    """Random lengths of a row: between two quantiles every length is equally likely; below the first it is the
    first."""
    return np.interp(rng.uniform(size=count), QUANTILES, row[1:])
