"""What the tests of constrained answers share: a tiny random model whose tokens are printable ASCII, an engine without
threads around it, and schemas whose answers are short."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedModel

from penstock.prefix.hashing import ChainHasher
from penstock.text.source import ModelSource
from penstock.wire.frames import Constraint, SamplingParams
from penstock.workers.compute.runner import TorchRunner
from penstock.workers.config import EngineConfig, SpeculationConfig
from penstock.workers.engine.blocks import BlockPool
from penstock.workers.engine.scheduler import Scheduler
from penstock.workers.engine.sequence import Sequence
from tests.unit.workers.tiny_models import SIZES, engine_config, saved, tiny_model

EOS = 95
"""Id of the end of sequence; the others are the printable ASCII characters from the space on."""
FIRST = 32

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 120}, "minItems": 1, "maxItems": 3},
    {"enum": ["red", "green", {"hex": "#fff"}, 7]},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "leaf"},
            "next": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
        },
        "required": ["kind", "next"],
        "additionalProperties": False,
    },
]


def constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def text_of(token_ids: Seq[int]) -> str:
    return "".join(chr(FIRST + token_id) for token_id in token_ids if token_id != EOS)


def ids_of(text: str) -> list[int]:
    return [ord(char) - FIRST for char in text]


def ascii_source(
    folder: Path, save: Callable[[PreTrainedModel, Path], ModelSource] = saved, **sizes: int
) -> ModelSource:
    """A checkpoint of a random model with a tokenizer of single characters. save: how its weights are written."""
    model = tiny_model("llama", **sizes)
    assert SIZES["vocab_size"] == EOS + 1
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    source = save(model, folder)
    # a byte-level vocabulary writes printable characters as they are, but for the space
    vocabulary = {"Ġ" if index == 0 else chr(FIRST + index): index for index in range(EOS)}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<end>", special=True)])
    raw.save(str(folder / "tokenizer.json"))
    return source


def speculating(method: str, **settings: Any) -> EngineConfig:
    return msgspec.structs.replace(
        engine_config(),
        speculation=SpeculationConfig(method=method, adaptive=False, **settings),  # type: ignore[arg-type]
    )


class Bench:
    """A runner under a scheduler, as the engine drives them."""

    def __init__(self, runner: TorchRunner, config: EngineConfig, num_blocks: int | None = None) -> None:
        """num_blocks: fewer than the runner has, so that sequences are preempted."""
        self.runner = runner
        self.hasher = ChainHasher(bytes(32), config.block_size)
        self.pool = BlockPool(num_blocks or runner.num_blocks, config.block_size)
        self.scheduler = Scheduler(self.pool, self.hasher, config, runner.max_model_len, runner.eos_token_ids)

    def sequence(
        self, wanted: Constraint | None, prompt: str | Seq[int] = "Say it: ", output: Seq[int] = (), **sampling: Any
    ) -> Sequence:
        """prompt: in single characters, or the token ids of another vocabulary."""
        params = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "seed": 5} | sampling)
        root = self.hasher.root("tiny")
        ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        seq = Sequence("r", [*ids, *output], params, len(ids), [], root, 0.0)
        if wanted is not None:
            seq.constrain(self.runner.compile_grammar(wanted, "tenant", list(output)))
        return seq

    def run(self, *sequences: Sequence) -> list[list[int]]:
        """The outputs of the sequences, side by side in one batch."""
        for seq in sequences:
            assert self.scheduler.add(seq), seq.error
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        self.pool.check([])
        return [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences]

    def step(self) -> list[int]:
        """A step; how many tokens each of its chunks gained."""
        step = self.scheduler.schedule()
        sampled = self.runner.launch(step)()
        for output in self.scheduler.commit(step, sampled):
            if output.finish is not None:
                self.runner.forget(output.seq)
        self.pool.check(self.scheduler.sequences())
        return [len(choices) for choices in sampled]
