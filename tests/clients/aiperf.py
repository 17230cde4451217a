"""AIPerf: a benchmark of a few streamed chats, some at once; no request may fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_REQUESTS = 12

folder = Path("artifacts").resolve()
# told to be offline it looks for a tokenizer among the hub's copies alone, and takes no folder
variables = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
subprocess.run(
    [
        *(sys.executable, "-P", "-m", "aiperf", "profile", "--model", os.environ["PENSTOCK_MODEL"]),
        *("--url", os.environ["PENSTOCK_URL"], "--endpoint-type", "chat", "--streaming"),
        *("--api-key", os.environ["OPENAI_API_KEY"], "--tokenizer", os.environ["PENSTOCK_TOKENIZER"]),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "3"),
        *("--artifact-dir", str(folder), "--ui", "none"),
    ],
    check=True,
    stdout=sys.stderr,
    env=variables,
)
(path,) = folder.rglob("profile_export_aiperf.json")
report = json.loads(path.read_text(encoding="utf-8"))
assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
assert not report.get("error_summary"), report["error_summary"]
print(f"did: {NUM_REQUESTS} streamed chats, 3 at once")
