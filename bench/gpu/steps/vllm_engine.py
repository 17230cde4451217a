"""vLLM on the same GPU, offline, with random weights of the same shape in bfloat16: decoding at batches of 1, 64 and
256 after a prompt of 1024 tokens. Where vLLM is installed; else the runner notes that it is not."""

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.rows import Rows
from bench.gpu.steps.checkpoint import write_config
from bench.gpu.steps.shapes import LLAMA_8B

BATCHES = (1, 64, 256)
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128


def run(rows: Rows, *, is_check: bool) -> bool:
    """A row for each batch: tokens a second from the first call to the last token, prompts taken off by a call that
    asks for one token."""
    assert not is_check, "vLLM does not run in the interpreter"
    import vllm  # noqa: PLC0415 (the step is left out where it is not installed)

    with tempfile.TemporaryDirectory(prefix="penstock-gpu-vllm-") as text:
        write_config(LLAMA_8B, Path(text))
        engine: Any = vllm.LLM(
            model=text, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
            max_num_seqs=max(BATCHES), enable_prefix_caching=False,
        )  # fmt: skip
        for batch in BATCHES:
            prompts = [
                {"prompt_token_ids": [3 + (7 * place + number) % 100_000 for place in range(PROMPT_TOKENS)]}
                for number in range(batch)
            ]
            seconds = {tokens: _seconds(engine, vllm, prompts, tokens) for tokens in (1, OUTPUT_TOKENS)}
            rate = batch * (OUTPUT_TOKENS - 1) / (seconds[OUTPUT_TOKENS] - seconds[1])
            rows.add(f"vLLM {vllm.__version__}, bf16, batch {batch}, context {PROMPT_TOKENS}", None, rate, "tokens/s")
    return True


def _seconds(engine: Any, vllm: Any, prompts: list[Any], tokens: int) -> float:
    params = vllm.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.generate(prompts, params, use_tqdm=False)
    begun_s = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begun_s
