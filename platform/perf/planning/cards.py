"""Cards: memory, bandwidth, FLOP/s by type, links, and a price that is dated.

Memory, bandwidth and FLOP/s (dense) are those of the vendor's data sheets, in units of 10^9 and 10^12;
what an engine reaches of them is `roofline`'s. A price is one vendor's list price on the day that it was read: prices
differ by several times between vendors, so a plan that decides something is given its own.
"""

from typing import NamedTuple

PRICE_DATE = "2026-11-26"
"""Day on which the prices were read."""
PRICE_SOURCE = "docs.runpod.io/serverless/pricing, active workers, USD"
"""Where: a list price by the second, of a worker that is always on, times 3600."""


class Card(NamedTuple):
    name: str
    memory_gb: float
    """10^9 bytes."""
    bandwidth_gb_s: float
    """10^9 bytes a second of its memory."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: it has no FP8."""
    link_gb_s: float
    """10^9 bytes a second that one card sends to others of its machine while it receives as many."""
    price_per_hour: float | None
    """Default price of one card; None: there is none."""
    source: str
    """Data sheet."""

    @property
    def has_fp8(self) -> bool:
        return self.fp8_tflops is not None


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("L4", 24, 300, 121, 242, 32, 0.468, "NVIDIA L4 data sheet (2023); PCIe 4 x16"),
        Card(
            "RTX4090", 24, 1008, 165.2, 330.3, 32, 0.756, "NVIDIA Ada GPU architecture (2022), float32 sums; PCIe 4 x16"
        ),
        Card("L40S", 48, 864, 362.05, 733, 32, 1.332, "NVIDIA L40S data sheet (2023); PCIe 4 x16"),
        Card("A100", 80, 2039, 312, None, 300, 2.16, "NVIDIA A100 80GB SXM data sheet (2021); NVLink 3"),
        Card("H100", 80, 3350, 989.4, 1978.9, 450, 3.348, "NVIDIA H100 SXM data sheet (2023); NVLink 4"),
        Card("H200", 141, 4800, 989.4, 1978.9, 450, 4.464, "NVIDIA H200 SXM data sheet (2024); NVLink 4"),
        Card("B200", 180, 8000, 2250, 4500, 900, 6.84, "NVIDIA DGX B200 data sheet (2024), an eighth; NVLink 5"),
    )
}


def find_card(name: str) -> Card | None:
    """The card of that name, upper or lower case, with or without spaces and dashes; None: it is not in the table."""
    wanted = _plain(name)
    return next((card for card in CARDS.values() if _plain(card.name) == wanted), None)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
