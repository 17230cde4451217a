"""vLLM, offline, as bench.engine asks it: runs under the Python that has vLLM, with nothing of Penstock but
bench.support.worker.

    python bench.support.vllm_worker FOLDER     (through bench.support.worker.module_command)

FOLDER is a checkpoint in Hugging Face's form. Weights and arithmetic are bfloat16; tokens go in and come out, so no
text is handled on either side.
"""

import sys
import time
from collections.abc import Callable, Mapping

from bench.support.worker import answer

MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 64


def main() -> None:
    answer(start)


def start() -> Mapping[str, Callable[..., object]]:
    import vllm  # noqa: PLC0415 (there only under the Python that has it; tests import this module)

    llm = vllm.LLM(
        model=sys.argv[-1],
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        dtype="bfloat16",
        max_num_seqs=MAX_NUM_SEQS,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> dict[str, object]:
        """Generate greedily; returns the number of tokens of each answer, and seconds for all."""
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return {"seconds": time.perf_counter() - begin, "tokens": [len(one.outputs[0].token_ids) for one in answers]}

    return {"generate": generate, "version": lambda: vllm.__version__}


if __name__ == "__main__":
    main()
