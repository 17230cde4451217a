"""What to expect of which card: weights, room for keys and values, and bounds of speed, as the tables of docs/gpu.md.

    python -m deploy.gpu_table      # writes them between their marks in docs/gpu.md

Arithmetic, not measurements. Shapes are those of the checkpoints' config.json; memory and bandwidth those of the
vendor's data sheets, in units of 10^9.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- tables of deploy/gpu_table.py -->\n", "<!-- end of the tables -->\n"
USABLE = 0.9
"""Part of a card's memory that is counted on; the rest is the driver's, the context's, and fragments."""
BESIDE_BYTES = 2 * 2**30
"""Bytes of a card beside weights, keys and values: activations, logits, recorded steps."""
LEAST_TOKENS = 2048
"""Fewer tokens of keys and values are not worth a replica."""
WEIGHT_BITS = {"bf16": 16.0, "AWQ, 4 bits": 4 + (16 + 4) / 128, "fp8": 8.0}
"""Bits of a weight of the layers, by format. AWQ: with a 16-bit scale and a 4-bit zero point for each 128."""
TABLE_BITS = {"bf16": 16.0, "AWQ, 4 bits": 8 + 16 / 32, "fp8": 8 + 16 / 32}
"""Bits of a weight of embedding and head, by the layers' format: `engine.lm_head: auto` makes int8 of them beside
quantized layers, with a 16-bit scale for each 32."""
FLOAT8_CAPABILITY = 8.9


class Model(NamedTuple):
    """Shape of a decoder with grouped heads and a gated MLP."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def table_weights(self) -> int:
        """Weights of the embedding table; the head has as many."""
        return self.vocab_size * self.hidden_size


class Card(NamedTuple):
    """A card, or several that one replica takes."""

    name: str
    num_cards: int
    memory_gb: float
    """10^9 bytes of one card."""
    bandwidth_gb_s: float
    """10^9 bytes a second of one card."""
    capability: float


MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Model("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936),
    Model("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936),
    Model("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
)
CARDS = (
    Card("L4", 1, 24, 300, 8.9),
    Card("RTX 4090", 1, 24, 1008, 8.9),
    Card("L40S", 1, 48, 864, 8.9),
    Card("A100", 1, 80, 2039, 8.0),
    Card("H100", 1, 80, 3350, 9.0),
    Card("2 H100", 2, 80, 3350, 9.0),
    Card("H200", 1, 141, 4800, 9.0),
    Card("2 H200", 2, 141, 4800, 9.0),
    Card("B200", 1, 180, 8000, 10.0),
)


def weight_bytes(model: Model, weights: str) -> float:
    """Bytes of the weights in a format of WEIGHT_BITS; biases and norms are left out."""
    return (model.layer_weights * WEIGHT_BITS[weights] + 2 * model.table_weights * TABLE_BITS[weights]) / 8


def kv_token_bytes(model: Model, kv: str) -> int:
    """Bytes of a token's keys and values. kv: bf16, or fp8, which has a float32 scale for each head."""
    numbers = 2 * model.num_layers * model.num_kv_heads
    return numbers * (model.head_dim + 4) if kv == "fp8" else numbers * model.head_dim * 2


def kv_tokens(model: Model, weights: str, kv: str, card: Card) -> int | None:
    """Tokens of keys and values beside the weights. Returns None where too few fit, or the card has no fp8."""
    if "fp8" in (weights, kv) and card.capability < FLOAT8_CAPABILITY:
        return None
    room = card.num_cards * (USABLE * card.memory_gb * 1e9 - BESIDE_BYTES) - weight_bytes(model, weights)
    found = int(room // kv_token_bytes(model, kv))
    return found if found >= LEAST_TOKENS else None


def most_tokens_per_s(model: Model, weights: str, card: Card) -> float:
    """Upper bound of one sequence's tokens a second without speculation: each token reads all layers and the head once
    from the memory, and here nothing else."""
    read = (model.layer_weights * WEIGHT_BITS[weights] + model.table_weights * TABLE_BITS[weights]) / 8
    return card.num_cards * card.bandwidth_gb_s * 1e9 / read


def render() -> str:
    """The three tables."""
    kinds = [(model, weights) for model in MODELS for weights in WEIGHT_BITS]
    sizes = [
        f"| {model.name} | {weights} | {weight_bytes(model, weights) / 1e9:.1f} GB "
        f"| {kv_token_bytes(model, 'bf16') / 1024:.0f} KiB | {kv_token_bytes(model, 'fp8') / 1024:.0f} KiB |"
        for model, weights in kinds
    ]
    return "\n\n".join(
        (
            "\n".join(
                ("| model | weights | they take | a token's KV in bf16 | in fp8 |", "|---|---|---|---|---|", *sizes)
            ),
            "Tokens of keys and values that fit beside the weights, in thousands, in bf16 / in fp8:",
            "\n".join(_rows(kinds, _tokens)),
            "At most so many tokens a second for one sequence:",
            "\n".join(_rows(kinds, _speed)),
        )
    )


def _rows(kinds: Sequence[tuple[Model, str]], cell: Callable[[Model, str, Card], str]) -> Iterator[str]:
    yield f"| model | weights | {' | '.join(card.name for card in CARDS)} |"
    yield "|" + "---|" * (len(CARDS) + 2)
    for model, weights in kinds:
        yield f"| {model.name} | {weights} | {' | '.join(cell(model, weights, card) for card in CARDS)} |"


def _tokens(model: Model, weights: str, card: Card) -> str:
    found = [kv_tokens(model, weights, kv, card) for kv in ("bf16", "fp8")]
    if found == [None, None]:
        return "-"
    return " / ".join("-" if tokens is None else f"{tokens / 1000:.0f}" for tokens in found)


def _speed(model: Model, weights: str, card: Card) -> str:
    fits = any(kv_tokens(model, weights, kv, card) is not None for kv in ("bf16", "fp8"))
    return f"{most_tokens_per_s(model, weights, card):.0f}" if fits else "-"


def insert(document: str) -> str:
    """The document with the tables between their marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{render()}\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(insert(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
