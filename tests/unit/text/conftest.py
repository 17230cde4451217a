"""The demo model's tokenizer, tiny checkpoints, and texts that tokenizers stumble over."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.text.source import ModelSource, resolve
from penstock.text.tokenizer import Tokenizer, load_tokenizer

NASTY = (
    "",
    " ",
    "   \n\n\t x  y\u00a0z \u3000 ",
    "It's we'LL I'm 's 'S \u017ft'\u017f they\u2019re",
    "12345 1 22 x  5 x\n5 ½²³ ٣٤ Ⅷ 一二三",
    "na\u00efve cafe\u0301 \u212b \u2126 \ufb01 \u1e9b\u0323",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 emoji\U0001f600x",
    "日本語のテキスト。中文文本,한국어",
    "עברית ‏العربية‎ हिन्दी ไทย",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\u2028\u2029\ufeff\ufffd",
    "a" * 300 + " " * 70 + "!" * 90,
    "\r\n\r\n  \r x\r\n  y\n\n\nz",
    "def f(x):\n    return x**2  # ok\n\n\n\tif a<=b: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <|im_end|><|im_end|>",
    "<|im_start <|im_end|",
    "\ufdd0 noncharacters \ufdef \U0010ffff",
)


@pytest.fixture(scope="session")
def demo() -> ModelSource:
    return resolve("demo")


@pytest.fixture(scope="session")
def demo_tokenizer(demo: ModelSource) -> Tokenizer:
    return load_tokenizer(demo)


@pytest.fixture(scope="session")
def real_texts(data_dir: Path) -> list[str]:
    """Questions, code, articles and chats; up to 4,000 characters each."""
    texts = [
        line[:4000]
        for name in ("mt_bench", "humaneval", "eagle_sum", "gsm8k_test", "aibrix_sharegpt_8min")
        for line in (data_dir / "text" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    ]
    return texts + [prompt for line in texts if (prompt := _prompt(line))]


def _prompt(line: str) -> str | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found.get("prompt") if isinstance(found, dict) else None


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF with one small tensor; `fill` adds metadata to gguf's writer."""

    def make(
        fill: Callable[[gguf.GGUFWriter], None], *, name: str = "tiny.gguf", weights: np.ndarray | None = None
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        fill(writer)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32) if weights is None else weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
