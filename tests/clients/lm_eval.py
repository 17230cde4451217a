"""EleutherAI's lm-eval: a generation task and a likelihood task, both of a local file."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

URL, MODEL, TOKENIZER = (os.environ[name] for name in ("PENSTOCK_URL", "PENSTOCK_MODEL", "PENSTOCK_TOKENIZER"))
CAPITALS = {"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "Spain": "Madrid"}
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
doc_to_text: "The capital of {{country}} is"
"""
GENERATION = """
task: capitals_said
output_type: generate_until
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
LIKELIHOOD = """
task: capitals_chosen
output_type: multiple_choice
doc_to_choice: ["Paris", "Rome", "Berlin", "Tokyo", "Madrid"]
doc_to_target: "{{capital}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def evaluate(task: str, kind: str, endpoint: str) -> dict[str, float]:
    """Figures of a task. kind: lm-eval's name of the client's form."""
    arguments = f"model={MODEL},base_url={URL}{endpoint},tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    output = Path(f"out-{task}-{kind}")
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "lm_eval", "--model", kind, "--model_args", arguments),
            *("--tasks", task, "--include_path", ".", "--output_path", str(output)),
            *(["--apply_chat_template"] if "chat" in kind else []),
        ],
        check=True,
        stdout=sys.stderr,
    )
    (path,) = output.rglob("results_*.json")
    figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["results"][task]
    return figures


lines = [json.dumps({"country": country, "capital": capital}) for country, capital in CAPITALS.items()]
Path("capitals.jsonl").write_text("\n".join(lines), encoding="utf-8")
for name, text in (("said", GENERATION), ("chosen", LIKELIHOOD)):
    Path(f"capitals_{name}.yaml").write_text(text + COMMON, encoding="utf-8")

for kind, endpoint in (("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")):
    assert "exact_match,none" in evaluate("capitals_said", kind, endpoint)
    print(f"did: a generation task of a local file ({kind})")

with urllib.request.urlopen(f"{URL}/openapi.json") as response:
    fields = json.load(response)["components"]["schemas"]["CompletionRequest"]["properties"]
if fields["echo"].get("deprecated"):
    print("not: a likelihood task, the API has no echo with logprobs yet")
else:
    assert evaluate("capitals_chosen", "local-completions", "/v1/completions")["acc,none"] >= 0.6
    print("did: a likelihood task of a local file")
