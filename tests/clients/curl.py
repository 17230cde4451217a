"""The program curl, as the documentation has it: a chat, a stream, models, tokenize, metrics, an error."""

import json
import os
import subprocess

URL, MODEL = os.environ["PENSTOCK_URL"], os.environ["PENSTOCK_MODEL"]
KEY = ["-H", f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}"]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}


def curl(path: str, *arguments: str) -> str:
    return subprocess.run(
        ["curl", "-sS", "--max-time", "120", f"{URL}{path}", *arguments], capture_output=True, text=True, check=True
    ).stdout


def post(path: str, body: object, *arguments: str) -> str:
    return curl(path, *KEY, "-H", "Content-Type: application/json", "-d", json.dumps(body), *arguments)


answer = json.loads(post("/v1/chat/completions", CHAT | {"temperature": 0}))
assert "Paris" in answer["choices"][0]["message"]["content"]
print("did: chat")

stream = post("/v1/chat/completions", CHAT | {"temperature": 0, "stream": True}, "-N")
events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
assert text == answer["choices"][0]["message"]["content"]
assert stream.endswith("data: [DONE]\n\n")
print("did: streamed chat")

assert MODEL in [model["id"] for model in json.loads(curl("/v1/models", *KEY))["data"]]
assert json.loads(curl("/v1/status", *KEY))["models"][0]["replicas"] == 1
print("did: models and status")

tokens = json.loads(post("/tokenize", {"model": MODEL, "prompt": "Hello"}))["tokens"]
assert json.loads(post("/detokenize", {"model": MODEL, "tokens": tokens}))["prompt"] == "Hello"
print("did: tokenize and detokenize")

assert curl("/health", "-o", os.devnull, "-w", "%{http_code}") == "200"
assert "penstock_replicas" in curl("/metrics")
assert "<title>Penstock</title>" in curl("/")
print("did: health, metrics and the page")

assert json.loads(curl("/v1/models"))["error"]["code"] == "invalid_api_key"
print("did: an error as JSON")
