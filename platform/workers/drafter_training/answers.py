"""The texts that a drafter learns from: prompts out of files, and what the target itself answers to them, every second
one greedily.

The answers go to a file as they come, a line of token ids each, so that a run that is broken off goes on, and a run
with other settings of the training finds them there.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from penstock.base.errors import ConfigError
from penstock.text.source import ModelSource
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.offline import OfflineEngine
from penstock.workers.engine.sequence import Sequence

TEMPERATURE = 0.8
"""Temperature of every second answer; the others are greedy."""
BATCH = 32


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


def write_answers(
    source: ModelSource,
    prompts: list[list[int]],
    path: Path,
    max_tokens: int,
    threads: int | None,
    on_answer: Callable[[int, int], None],
) -> None:
    """Add the target's answers to the prompts that the file has none for. on_answer: called with the number of answers
    that are there, and that of all. Raises ConfigError, EngineFault."""
    done = {tuple(answer.prompt) for answer in read_answers(path)}
    left = [prompt for prompt in prompts if tuple(prompt) not in done]
    if not left:
        return
    longest = max(map(len, left)) + max_tokens
    config = EngineConfig(max_num_seqs=BATCH, max_batched_tokens=512, threads=threads, max_model_len=longest)
    runner = load_runner(source, config)
    _cut_tail(path)
    waiting = enumerate(left)
    with path.open("ab", buffering=0) as file, OfflineEngine(runner, config) as engine:

        def submit(count: int) -> None:
            for number, prompt in islice(waiting, count):
                temperature = TEMPERATURE * (number % 2)
                engine.submit(str(number), prompt, SamplingParams(max_tokens, seed=number, temperature=temperature))

        submit(2 * BATCH)
        for number in range(len(left)):
            file.write(msgspec.json.encode(_answer(engine.wait())) + b"\n")
            on_answer(len(prompts) - len(left) + number + 1, len(prompts))
            submit(1)


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
