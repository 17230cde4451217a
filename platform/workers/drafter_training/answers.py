"""The texts that a drafter learns from: prompts out of files, and what the target itself answers to them, every second
one greedily.

The answers go to a file as they come, a line of token ids each, so that a run that is broken off goes on, and a run
with other settings of the training finds them there.
"""

import queue
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from penstock.base.errors import ConfigError
from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import Finish, SamplingParams
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine, StepReport
from penstock.workers.engine.sequence import Sequence

FIELDS = ("turns", "prompt", "question", "text")
"""Fields of a JSON line that may hold a prompt; the first that is there counts. Of several turns the first is asked."""
TEMPERATURE = 0.8
"""Temperature of every second answer; the others are greedy."""
BATCH = 32
WAIT_S = 5.0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One conversation as token ids."""

    prompt: list[int]
    output: list[int]


def read_prompts(path: Path) -> Iterator[str]:
    """The prompts of a file of JSON lines. Raises ConfigError that names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        found = next((row[name] for name in FIELDS if name in row), None)
        text = found[0] if isinstance(found, list) and found else found
        if not isinstance(text, str):
            raise ConfigError(f"{path}, line {number}: none of the fields {', '.join(FIELDS)} holds text")
        yield text


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
    that are there, and that of all. Raises ConfigError."""
    done = {tuple(answer.prompt) for answer in read_answers(path)}
    left = [prompt for prompt in prompts if tuple(prompt) not in done]
    if not left:
        return
    longest = max(map(len, left)) + max_tokens
    config = EngineConfig(max_num_seqs=BATCH, max_batched_tokens=512, threads=threads, max_model_len=longest)
    hasher = ChainHasher(bytes(32), config.block_size)
    finished: queue.SimpleQueue[Sequence] = queue.SimpleQueue()

    def collect(report: StepReport) -> None:
        for output in report.outputs:
            if output.finish is not None:
                finished.put(output.seq)

    engine = Engine(load_runner(source, config), config, hasher, collect)
    _cut_tail(path)
    waiting = iter(left)
    engine.start()
    try:
        with path.open("ab", buffering=0) as file:
            for number, prompt in enumerate(islice(waiting, 2 * BATCH)):
                engine.submit(_sequence(number, prompt, max_tokens, hasher))
            for number in range(len(left)):
                answer = _answer(_next(finished, engine))
                file.write(msgspec.json.encode(answer) + b"\n")
                on_answer(len(prompts) - len(left) + number + 1, len(prompts))
                for prompt in islice(waiting, 1):
                    engine.submit(_sequence(number + 1, prompt, max_tokens, hasher))
    finally:
        engine.stop()


def _next(finished: "queue.SimpleQueue[Sequence]", engine: Engine) -> Sequence:
    while True:
        try:
            return finished.get(timeout=WAIT_S)
        except queue.Empty:
            if not engine.is_healthy(time.monotonic()):
                raise ConfigError("the model's engine has ended; its log says why") from None


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


def _sequence(number: int, prompt: list[int], max_tokens: int, hasher: ChainHasher) -> Sequence:
    keys = hasher.extend(hasher.root("answers"), prompt)
    sampling = SamplingParams(max_tokens=max_tokens, seed=number, temperature=TEMPERATURE * (number % 2))
    return Sequence(str(number), list(prompt), sampling, len(prompt), keys, keys[-1] if keys else b"", time.monotonic())
