"""`vllm bench serve`: random prompts to the chat and the completion endpoint; no request may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 12

for backend, endpoint in (("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")):
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend),
            *("--base-url", os.environ["PENSTOCK_URL"], "--endpoint", endpoint),
            *("--model", os.environ["PENSTOCK_MODEL"], "--tokenizer", os.environ["PENSTOCK_TOKENIZER"]),
            *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"),
            *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "3"),
            *("--save-result", "--result-filename", f"{backend}.json"),
        ],
        check=True,
        stdout=sys.stderr,
    )
    result = json.loads(Path(f"{backend}.json").read_text(encoding="utf-8"))
    assert result["completed"] == NUM_REQUESTS, result
    print(f"did: {NUM_REQUESTS} requests, 3 at once ({backend})")
