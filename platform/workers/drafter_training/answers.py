"""The texts that a drafter learns from: prompts out of files or made up by the target (Magpie, Xu et al. 2024, arXiv
2406.08464: a chat model that is given nothing but the opening of the user's turn goes on with a question), and what the
target itself answers to them, every second one greedily.

The answers go to a file as they come, a line of token ids each, so that a run that is broken off goes on, and a run
with other settings of the training finds them there.
"""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Literal

import msgspec
import torch

from penstock.base.errors import ConfigError
from penstock.text.corpus import read_lines
from penstock.text.source import ModelSource
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import LEAST_AUTO_TOKENS, AdapterSlots, EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import Sequence

TEMPERATURE = 0.8
"""Temperature of every second answer; the others are greedy."""
BATCH = {"cpu": 64, "cuda": 256}
"""Sequences at once, by device."""
LONGEST_MADE, SHORTEST_MADE = 192, 4
"""Tokens of a prompt that the target makes up."""
SEED_STRIDE = 1 << 24
"""Seeds of sampled texts between those of one seed of the training and of the next."""
MOST_TRIES = 8
"""Prompts that it is asked for, of each that is wanted: some come twice, or have no end."""


Device = Literal["cpu", "cuda"]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One conversation as token ids."""

    prompt: list[int]
    output: list[int]


def encode_prompts(tokenizer: Tokenizer, prompts: Iterator[str], max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, as a chat where the model has a template. Those that are longer, or that the model
    can't read, are left out."""
    encoded: list[list[int]] = []
    for text in prompts:
        try:
            if tokenizer.is_chat:
                encoded.append(tokenizer.encode_chat([{"role": "user", "content": text}], max_tokens=max_tokens))
            else:
                encoded.append(tokenizer.encode(text, add_special=True, max_tokens=max_tokens))
        except (InvalidRequest, ContextTooLong):
            continue
    return encoded


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file; a last line that was broken off is left out."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Answer)
    found: list[Answer] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {len(found) + 1}, is no answer: {error}") from error
    return found


def engine_config(device: Device, threads: int | None, longest: int) -> EngineConfig:
    """The engine that answers. longest: tokens of a sequence, at most."""
    return EngineConfig(
        device=device,
        max_num_seqs=BATCH[device],
        max_batched_tokens=512 if device == "cpu" else LEAST_AUTO_TOKENS,
        threads=threads,
        max_model_len=longest,
        adapters=AdapterSlots(slots=0),
    )


def make_prompts(
    source: ModelSource,
    tokenizer: Tokenizer,
    number: int,
    path: Path,
    seed: int,
    device: Device,
    threads: int | None,
    on_prompt: Callable[[int, int], None],
) -> None:
    """Have the target make up prompts until the file holds so many, each once: JSON lines of a `prompt`. seed: another
    one makes up others. on_prompt: called with the number that is there, and that of all. Raises ConfigError,
    EngineFault."""
    _cut_tail(path)
    made = {texts[0] for texts in read_lines(path)} if path.exists() else set[str]()
    if len(made) >= number:
        return
    opening, first, tries = _opening(tokenizer), len(made), MOST_TRIES * number
    begin = SEED_STRIDE * seed + first
    requests = ((opening, SamplingParams(LONGEST_MADE, seed=begin + n, temperature=1.0)) for n in range(tries))
    seqs = _generate(source, requests, len(opening) + LONGEST_MADE, device, threads)
    with path.open("ab", buffering=0) as file, closing(seqs):
        for seq in seqs:
            output = _answer(seq).output
            text = tokenizer.decode(output).strip()
            if seq.finish is not Finish.STOP or len(output) < SHORTEST_MADE or not text or text in made:
                continue
            made.add(text)
            file.write(msgspec.json.encode({"prompt": text}) + b"\n")
            on_prompt(len(made), number)
            if len(made) == number:
                return
    raise ConfigError(f"of {tries} prompts that the model made up only {len(made)} are of use; name files of prompts")


def _opening(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a chat up to where the user's text begins."""
    if not tokenizer.is_chat:
        raise ConfigError("a model without a chat template can't make up prompts; name files of prompts")
    first, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "Z"))
    return [ours for ours, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False))]


def write_answers(
    source: ModelSource,
    prompts: list[list[int]],
    path: Path,
    max_tokens: int,
    seed: int,
    device: Device,
    threads: int | None,
    on_answer: Callable[[int, int], None],
) -> None:
    """Add the target's answers to the prompts that the file has none for. seed: of what is sampled. on_answer: called
    with the number of answers that are there, and that of all. Raises ConfigError, EngineFault."""
    done = {tuple(answer.prompt) for answer in read_answers(path)}
    left = [prompt for prompt in prompts if tuple(prompt) not in done]
    if not left:
        return
    _cut_tail(path)
    requests = (
        (prompt, SamplingParams(max_tokens, seed=SEED_STRIDE * seed + number, temperature=TEMPERATURE * (number % 2)))
        for number, prompt in enumerate(left)
    )
    seqs = _generate(source, requests, max(map(len, left)) + max_tokens, device, threads)
    with path.open("ab", buffering=0) as file, closing(seqs):
        for number, seq in enumerate(seqs, 1):
            file.write(msgspec.json.encode(_answer(seq)) + b"\n")
            on_answer(len(prompts) - len(left) + number, len(prompts))


def _generate(
    source: ModelSource,
    requests: Iterator[tuple[list[int], SamplingParams]],
    longest: int,
    device: Device,
    threads: int | None,
) -> Generator[Sequence]:
    """The sequences of the requests, as they end. longest: tokens of one, at most. In the end nothing of the engine is
    left on the device."""
    try:
        yield from _run(source, requests, engine_config(device, threads, longest), BATCH[device])
    finally:
        gc.collect()  # an engine and its callbacks refer to each other
        if device == "cuda":
            torch.cuda.empty_cache()


def _run(
    source: ModelSource, requests: Iterator[tuple[list[int], SamplingParams]], config: EngineConfig, batch: int
) -> Generator[Sequence]:
    with OfflineEngine(load_runner(source, config), config) as engine:
        num_left = 0
        for number, (prompt, sampling) in enumerate(requests):
            engine.submit(str(number), prompt, sampling)
            num_left += 1
            if num_left == 2 * batch:
                yield engine.wait()
                num_left -= 1
        for _ in range(num_left):
            yield engine.wait()


def _answer(seq: Sequence) -> Answer:
    if seq.finish not in (Finish.STOP, Finish.LENGTH):
        raise ConfigError(f"an answer ended with {seq.finish}: {seq.error}")
    return Answer(seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :])


def _cut_tail(path: Path) -> None:
    """Take a line away that was broken off."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])
