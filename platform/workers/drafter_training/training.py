"""`penstock train-drafter`: from prompts to a head, in steps that go on where they were broken off.

The folder holds the target's answers, its features over them, the state of the training (saved once a minute) and, in
the end, the head. A run with other prompts, target or seed than the folder's is refused; with more time it goes on.
"""

import fcntl
import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.base.cores import available_cores
from penstock.base.errors import ConfigError
from penstock.text.corpus import read_lines
from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import load_tokenizer
from penstock.workers.compute.loading import has_bfloat16
from penstock.workers.compute.model_config import ModelConfig, read_config
from penstock.workers.compute.models.rope import inverse_frequencies, rope_tables
from penstock.workers.compute.quant.quantized import QuantizedTensor
from penstock.workers.compute.speculation.head_file import (
    MATRICES,
    HeadSpec,
    dense_weights,
    quantize_head,
    read_head,
    write_head,
)
from penstock.workers.compute.weights import ROPE_FACTORS, read_weights
from penstock.workers.drafter_training.answers import (
    Answer,
    Device,
    encode_prompts,
    make_prompts,
    read_answers,
    write_answers,
)
from penstock.workers.drafter_training.examples import Examples, unit
from penstock.workers.drafter_training.features import FeatureStore, compute_features
from penstock.workers.drafter_training.head import Loss, TrainedHead, initial_weights
from penstock.workers.drafter_training.target import load_target

HEAD_FILE = "head.safetensors"
MADE_FILE = "made-prompts.jsonl"
_RECIPE_FILE = "recipe.json"
HELD_OUT = 50
"""One answer of so many is never trained on, and shows what the head has learned."""
BATCH = {"cpu": 4, "cuda": 32}
"""Answers to a step of the optimizer, by device."""
GPU_TOKENS = 16384
"""Tokens of answers, filled up to the longest, that a GPU computes at once with a vocabulary of VOCABULARY tokens, and
fewer with a larger one: their scores, some ten times, take most of its memory. Answers that are longer are alone."""
VOCABULARY = 8192
LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on Triton compiles our kernels and tensor cores multiply bfloat16."""
LEARNING_RATE = {"cpu": 1e-3, "cuda": 2e-3}
"""The largest one, by device: steps of more answers go further."""
WARM_UP_STEPS = 50
SHALLOW_SHARE = 0.6
"""Part of the training in which the first token ahead is learned alone: those behind it hang on it, and three cost as
much as three times the text. What is left learns all of them, with matrices rounded as they will be written."""
GOING_ON_BATCH, GOING_ON_RATE, GOING_ON_SHALLOW_SHARE = 2, 0.7, 0.3
"""What is other for a head that has learned already: answers to a step and largest rate, of those above; and the part
of the training in which the first token is learned alone."""
FIRST_TOKENS = 8
"""Tokens of a prompt from which on it is learned, where prompts are."""
SAVE_EVERY_S = 60.0
MAX_HELD_OUT = 64


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    prompts: Sequence[Path]
    out: Path
    minutes: float
    """Time for the training itself, answers and features apart; what an earlier run took counts."""
    epochs: int = 4
    vocabulary: int = VOCABULARY
    """Rows of the head's output matrix."""
    depth: int = 3
    """Tokens ahead that are trained; what is drafted behind them follows from those."""
    bits: int = 8
    """Bits of a weight in the head that is written, 4 or 8."""
    max_prompts: int | None = None
    """Prompts that are drawn from all of them; None: all."""
    max_prompt_tokens: int = 768
    max_answer_tokens: int = 256
    made_prompts: int = 0
    """Prompts that the target makes up itself, beside those of files."""
    learns_prompts: bool = False
    """Whether what the target says of the prompts' own tokens is learned too: several times the tokens, of texts that
    are not its own."""
    start: Path | None = None
    """A head whose weights are the first ones; None: they are made from the target's."""
    threads: int | None = None
    seed: int = 0
    device: Device = "cpu"
    """Where all of it is computed. The features of a GPU's target are not kept: they are computed again each time."""


class Recipe(msgspec.Struct, frozen=True):
    """What a folder is of; another run must have the same."""

    model: str
    prompts: str
    vocabulary: int
    depth: int
    max_answer_tokens: int
    seed: int
    start: str
    learns_prompts: bool = False
    made_prompts: int = 0


@dataclass(slots=True)
class Progress:
    """Where the training stands."""

    phase: str
    """prompts, answers, features, training or done."""
    done: int
    total: int
    loss: float = 0.0
    held_out_loss: float = 0.0
    """Loss over answers that are never trained on, when the training began or ended."""
    kept: list[float] = field(default_factory=list)
    """Share of the tokens of held-out answers from which so many tokens, 1 or more, were said in advance."""
    trained_tokens: int = 0
    seconds: float = 0.0
    """Time of the training, earlier runs included."""

    @property
    def kept_tokens(self) -> float:
        """Tokens that a draft of as many tokens as are trained has kept on average."""
        return sum(self.kept)


OnProgress = Callable[[Progress], None]


def train_drafter(plan: Plan, on_progress: OnProgress) -> Path:
    """Make or go on making the head in the folder `out`; returns its path. Raises ConfigError."""
    plan.out.mkdir(parents=True, exist_ok=True)
    fd = os.open(plan.out, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _train(plan, on_progress)
    except BlockingIOError:
        raise ConfigError(f"another process trains in {plan.out}") from None
    except torch.OutOfMemoryError as error:
        text = str(error).partition(". ")[0]
        raise ConfigError(
            f"the GPU's memory is too small for this training; --device cpu has the host's: {text}"
        ) from error
    finally:
        os.close(fd)  # and with it goes the lock


def best_device() -> Device:
    """A GPU where torch finds one that our kernels are for."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= LEAST_CAPABILITY else "cpu"


def _gpu_tokens(plan: Plan) -> int:
    return GPU_TOKENS * VOCABULARY // max(VOCABULARY, plan.vocabulary)


def _train(plan: Plan, on_progress: OnProgress) -> Path:
    source = resolve(plan.model)
    config = read_config(source)
    if config.num_layers < 4:
        raise ConfigError(f"a head takes features of three layers below the last; {source.name} has too few layers")
    _check_plan(plan, config)
    device = torch.device(plan.device)
    threads = plan.threads or available_cores()
    torch.set_num_threads(threads)
    answers = _answers(plan, source, threads, on_progress)
    taps = default_taps(config.num_layers)
    examples: Examples
    if device.type == "cuda":
        examples = load_target(source, answers, taps, device, _gpu_tokens(plan))
    else:
        examples = store = FeatureStore(plan.out, answers, len(taps), config.hidden_size)
        compute_features(
            source, answers, taps, store, threads, lambda done, total: on_progress(Progress("features", done, total))
        )
    training = _Training(plan, source, config, taps, answers, examples, device)
    training.run(on_progress)
    return plan.out / HEAD_FILE


def _check_plan(plan: Plan, config: ModelConfig) -> None:
    """Raises ConfigError, before anything is computed."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda needs a GPU that torch can use, and here torch finds none; leave --device out, or install "
            "torch for CUDA"
        )
    if not plan.prompts and plan.made_prompts < 1:
        raise ConfigError("a head is trained on answers: name files of prompts, or how many the model makes up")
    if plan.epochs < 1 or plan.depth < 1 or plan.vocabulary < 1:
        raise ConfigError("epochs, depth and vocabulary must be 1 at least")
    if plan.bits not in (4, 8):
        raise ConfigError(f"a head is written in 4 or 8 bits, not {plan.bits}")
    if plan.start is None:
        return
    spec = read_head(plan.start).spec
    spec.check_fits(config)
    taps = default_taps(config.num_layers)
    if spec.taps != taps:
        raise ConfigError(f"{plan.start} takes features behind layers {spec.taps}, not {taps}")


def default_taps(num_layers: int) -> list[int]:
    """Layers, of 4 at least, behind which features are taken: a low one, the middle, and the last but one."""
    low = min(2, num_layers - 4)
    return [low, max(low + 1, min(num_layers // 2, num_layers - 3)), num_layers - 2]


def choose_vocabulary(answers: Sequence[Answer], size: int, vocab_size: int) -> Tensor:
    """The tokens that come most often in answers, then in prompts, ascending: int64 [size]."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for part, weight in (("output", 1.0), ("prompt", 1e-6)):
        ids = torch.tensor([token for answer in answers for token in getattr(answer, part)], dtype=torch.int64)
        counts += weight * torch.bincount(ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[: min(size, vocab_size)].sort().values


def _answers(plan: Plan, source: ModelSource, threads: int, on_progress: OnProgress) -> list[Answer]:
    _check_folder(plan)
    tokenizer, paths = load_tokenizer(source), list(plan.prompts)
    if plan.made_prompts:
        paths.append(plan.out / MADE_FILE)
        make_prompts(
            source,
            tokenizer,
            plan.made_prompts,
            paths[-1],
            plan.seed,
            plan.device,
            threads,
            lambda done, total: on_progress(Progress("prompts", done, total)),
        )
    prompts = []
    for path in paths:
        is_made = path == plan.out / MADE_FILE
        texts = islice((each[0] for each in read_lines(path)), plan.made_prompts if is_made else None)
        prompts += encode_prompts(tokenizer, texts, plan.max_prompt_tokens)
    prompts = list({tuple(prompt): prompt for prompt in prompts}.values())
    if not prompts:
        raise ConfigError(f"no prompt of {', '.join(map(str, paths))} fits {plan.max_prompt_tokens} tokens")
    random.Random(plan.seed).shuffle(prompts)
    prompts = prompts[: plan.max_prompts]
    _check_recipe(
        plan.out,
        Recipe(
            source.digest,
            hashlib.sha256(msgspec.json.encode(prompts)).hexdigest(),
            plan.vocabulary,
            plan.depth,
            plan.max_answer_tokens,
            plan.seed,
            "" if plan.start is None else hashlib.sha256(plan.start.read_bytes()).hexdigest(),
            plan.learns_prompts,
            plan.made_prompts,
        ),
    )
    path = plan.out / "answers.jsonl"
    write_answers(
        source,
        prompts,
        path,
        plan.max_answer_tokens,
        plan.seed,
        plan.device,
        threads,
        lambda done, total: on_progress(Progress("answers", done, total)),
    )
    answers = read_answers(path)
    if plan.learns_prompts:
        answers = [Answer(a.prompt[:FIRST_TOKENS], a.prompt[FIRST_TOKENS:] + a.output) for a in answers]
    return [answer for answer in answers if len(answer.output) > 2]


def _check_folder(plan: Plan) -> None:
    """Raises ConfigError where the folder is of something else, before prompts are made up in it."""
    names = {path.name for path in plan.out.iterdir()}
    if _RECIPE_FILE not in names:
        if names - {MADE_FILE}:
            raise ConfigError(f"{plan.out} is not empty, and not of penstock train-drafter; name another folder")
        return
    found = msgspec.json.decode((plan.out / _RECIPE_FILE).read_bytes(), type=Recipe)
    if found.made_prompts != plan.made_prompts:
        raise ConfigError(
            f"{plan.out} is of a run with {found.made_prompts} made-up prompts; name another folder, or begin with its "
            "head (--from)"
        )


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    path = folder / _RECIPE_FILE
    if path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=Recipe)
        if found != recipe:
            names = [n for n in Recipe.__struct_fields__ if getattr(found, n) != getattr(recipe, n)]
            raise ConfigError(
                f"{folder} is of a run with another {', '.join(names)}; name another folder, or begin with its head "
                "(--from)"
            )
    else:
        path.write_bytes(msgspec.json.encode(recipe))


class _Training:
    def __init__(
        self,
        plan: Plan,
        source: ModelSource,
        config: ModelConfig,
        taps: list[int],
        answers: Sequence[Answer],
        examples: Examples,
        device: torch.device,
    ) -> None:
        self._plan, self._examples, self._device = plan, examples, device
        is_on_gpu = device.type == "cuda"
        self._num_threads = 1 if is_on_gpu else plan.threads or available_cores()
        self._most_tokens = _gpu_tokens(plan) if is_on_gpu else 0
        self._in_bf16 = is_on_gpu or has_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        held_out = [index for index in range(len(answers)) if index % HELD_OUT == 0]
        self._train = [index for index in range(len(answers)) if index % HELD_OUT]
        self._held_out = held_out[:MAX_HELD_OUT]
        self._num_tokens = [len(answer.output) for answer in answers]
        self._lengths = [len(answer.prompt) + len(answer.output) for answer in answers]
        if not self._train:
            raise ConfigError(f"{len(answers)} answers are too few to train with")
        parts = _read_parts(source, config)
        self._embed = unit(parts["embed"]).to(device)
        lm_head = parts.get("lm_head", parts["embed"])
        trained_tokens = 0
        if plan.start is None:
            self._vocabulary = choose_vocabulary(
                [answers[index] for index in self._train], plan.vocabulary, len(lm_head)
            )
            layer = {name.rpartition(".")[2]: value for name, value in parts.items() if name.startswith("layers.")}
            weights = initial_weights(
                layer, parts["norm"], lm_head[self._vocabulary], len(taps), torch.Generator().manual_seed(plan.seed)
            )
        else:
            head = read_head(plan.start)
            self._vocabulary, weights = head.vocabulary, dense_weights(head)
            trained_tokens = head.spec.trained_tokens
        places = torch.full((len(lm_head),), -1)
        places[self._vocabulary] = torch.arange(len(self._vocabulary))
        self._places = places.to(device)
        self._target = (lm_head[self._vocabulary] * parts["norm"]).to(device)
        cos, sin = rope_tables(inverse_frequencies(config, parts.get(ROPE_FACTORS)), max(self._lengths))
        self._head = TrainedHead(config, weights, (cos.to(device), sin.to(device))).to(device)
        goes_on = plan.start is not None
        self._most_rate = LEARNING_RATE[device.type] * (GOING_ON_RATE if goes_on else 1.0)
        self._shallow_share = GOING_ON_SHALLOW_SHARE if goes_on else SHALLOW_SHARE
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [getattr(self._head, name) for name in MATRICES], "weight_decay": 0.01},
                {
                    "params": [p for name, p in self._head.named_parameters() if name not in MATRICES],
                    "weight_decay": 0.0,
                },
            ],
            lr=self._most_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._spec = HeadSpec(
            target=source.name,
            target_vocab_size=config.vocab_size,
            target_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            taps=taps,
            trained_tokens=trained_tokens,
        )
        self._batch = BATCH[device.type] * (GOING_ON_BATCH if goes_on else 1)
        steps_an_epoch = -(-len(self._train) // self._batch)
        self._state = Progress("training", 0, plan.epochs * steps_an_epoch, trained_tokens=trained_tokens)

    def run(self, on_progress: OnProgress) -> None:
        """Train until the time or the epochs are over, and write the head."""
        with ThreadPoolExecutor(self._num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            self._run(threads, on_progress)

    def _run(self, threads: Executor, on_progress: OnProgress) -> None:
        plan, state = self._plan, self._state
        self._resume()
        self._evaluate()
        on_progress(state)
        begin_s, saved_s = time.monotonic() - state.seconds, time.monotonic()
        steps_an_epoch, losses, is_late = state.total // plan.epochs, 0.0, False
        while state.done < state.total and state.seconds < 60 * plan.minutes:
            epoch, place = divmod(state.done, steps_an_epoch)
            order = list(self._train)
            random.Random(f"{plan.seed} {epoch}").shuffle(order)
            chosen = order[place * self._batch : (place + 1) * self._batch]
            share = max(state.done / state.total, state.seconds / (60 * plan.minutes))
            rate = self._most_rate * min(1.0, (state.done + 1) / WARM_UP_STEPS) * max(0.02, 1 - share)
            if is_late != (is_late := share >= self._shallow_share):
                state.loss = 0.0  # it is a sum over the tokens ahead
            losses = self._step(threads, chosen, rate, is_late=is_late)
            state.done += 1
            state.loss = losses if not state.loss else 0.98 * state.loss + 0.02 * losses
            state.trained_tokens += sum(self._num_tokens[index] for index in chosen)
            state.seconds = time.monotonic() - begin_s
            on_progress(state)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                self._save()
                saved_s = time.monotonic()
        self._save()
        self._evaluate()
        weights = {name: value.detach().cpu() for name, value in self._head.named_parameters()}
        spec = msgspec.structs.replace(self._spec, trained_tokens=state.trained_tokens)
        write_head(quantize_head(spec, weights, self._vocabulary, plan.bits), plan.out / HEAD_FILE)
        state.phase = "done"
        on_progress(state)

    def _step(self, threads: Executor, chosen: Sequence[int], rate: float, *, is_late: bool) -> float:
        depth = self._plan.depth if is_late else 1
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        if is_late:
            self._head.round(self._plan.bits)
        # an answer to a thread: products of one are too small to be divided well. Gradients are added one by one
        groups = self._groups(chosen)
        total = sum(threads.map(lambda group: self._learn(group, len(group) / len(chosen), depth), groups))
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return total

    def _groups(self, chosen: Sequence[int]) -> list[list[int]]:
        """Answers that are computed at once, of about the same length: each alone on a CPU."""
        groups: list[list[int]] = []
        for index in sorted(chosen, key=lambda index: -self._lengths[index]):
            if groups and (len(groups[-1]) + 1) * self._lengths[groups[-1][0]] <= self._most_tokens:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _learn(self, group: Sequence[int], share: float, depth: int) -> float:
        """Add the gradients of some answers; their loss. share: of those of the step."""
        loss = share * self._loss(group, depth).total
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _loss(self, group: Sequence[int], depth: int) -> Loss:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._in_bf16):
            return self._head.loss(self._examples.batch(group), self._embed, self._target, self._places, depth)

    def _evaluate(self) -> None:
        self._head.round(self._plan.bits)
        bases, num_answers, total, kept = 0, 0, 0.0, [0] * self._plan.depth
        with torch.no_grad():
            for group in self._groups(self._held_out):
                found = self._loss(group, self._plan.depth)
                bases += found.num_bases
                num_answers += len(group)
                total += float(found.total) * len(group)
                for ahead, count in enumerate(found.num_kept):
                    kept[ahead] += int(count)
        self._head.round(None)
        self._state.held_out_loss = total / max(1, num_answers)
        self._state.kept = [count / max(1, bases) for count in kept]

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._head.named_parameters():
            tensors[name] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = value
        path = self._plan.out / "training.safetensors"
        partial = path.with_suffix(".tmp")
        state = {
            "done": self._state.done,
            "batch": self._batch,
            "trained_tokens": self._state.trained_tokens,
            "seconds": self._state.seconds,
        }
        save_file(tensors, partial, metadata={"state": msgspec.json.encode(state).decode()})
        partial.rename(path)

    def _resume(self) -> None:
        path = self._plan.out / "training.safetensors"
        if not path.exists():
            return
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            state = msgspec.json.decode(file.metadata()["state"], type=dict[str, float])
        with torch.no_grad():
            for name, parameter in self._head.named_parameters():
                parameter.copy_(tensors.pop(name))
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    if f"{name}.{key}" in tensors:
                        self._optimizer.state[parameter][key] = tensors.pop(f"{name}.{key}").to(self._device)
        done, batch = int(state["done"]), int(state.get("batch", BATCH["cpu"]))
        if batch != self._batch:  # it was trained on another device; the order of answers is the same
            epoch, place = divmod(done, -(-len(self._train) // batch))
            done = epoch * -(-len(self._train) // self._batch) + place * batch // self._batch
        self._state.done, self._state.trained_tokens = done, int(state["trained_tokens"])
        self._state.seconds = state["seconds"]


def _read_parts(source: ModelSource, config: ModelConfig) -> dict[str, Tensor]:
    """The target's table, output matrix, last norm and last layer, dense, float32."""
    found: dict[str, Tensor] = {}
    for prefix in ("embed", "norm", "lm_head", ROPE_FACTORS, f"layers.{config.num_layers - 1}."):
        for name, value in read_weights(source, config, torch.float32, prefix):
            found[name] = value.dequantize() if isinstance(value, QuantizedTensor) else value
    return found
