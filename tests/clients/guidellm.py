"""GuideLLM: a benchmark of a few synthetic chats, one after another, and of some at once; no request may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROFILES = {"one at a time": {"kind": "synchronous"}, "four at once": {"kind": "concurrent", "streams": 4}}
NUM_REQUESTS = 8
BACKEND = {
    "kind": "openai_http",
    "target": os.environ["PENSTOCK_URL"],
    "model": os.environ["PENSTOCK_MODEL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "request_format": "/v1/chat/completions",
}

for number, (words, profile) in enumerate(PROFILES.items()):
    path = Path(f"benchmark-{number}.json").resolve()
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "guidellm", "run", "--backend", json.dumps(BACKEND)),
            *("--profile", json.dumps(profile), "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['PENSTOCK_TOKENIZER']}"),
            *("--output", f"kind=json,path={path}", "--disable-console-interactive"),
        ],
        check=True,
        stdout=sys.stderr,
    )
    (benchmark,) = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= NUM_REQUESTS, totals
    print(f"did: {NUM_REQUESTS} chats, {words}")
