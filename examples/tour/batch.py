"""Has questions answered as a batch, whenever there is room, and prints the answers: `python examples/tour/batch.py`.

Beside `make up`, with the variables of .penstock/env. OpenAI's clients make the same four requests: `files.create`,
`batches.create`, `batches.retrieve`, `files.content`.
"""

import json
import os
import time

import httpx

QUESTIONS = {
    "france": "What is the capital of France?",
    "italy": "What is the capital of Italy?",
    "sun": "Is the sun a star?",
}
ENDPOINT = "/v1/chat/completions"
POLL_S = 0.5


def line(name: str, question: str) -> str:
    """A line of the batch's file: its name, and the request as the endpoint takes it."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0}
    return json.dumps({"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body})


def run(client: httpx.Client, text: str) -> dict[str, str]:
    """The answers by name, when the batch has ended."""
    file = client.post("files", data={"purpose": "batch"}, files={"file": ("questions.jsonl", text)}).json()
    wanted = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch = client.post("batches", json=wanted).raise_for_status().json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(POLL_S)
        batch = client.get(f"batches/{batch['id']}").json()
    print(f"{batch['status']}: {batch['request_counts']['completed']} of {batch['request_counts']['total']} lines")
    answers = map(json.loads, client.get(f"files/{batch['output_file_id']}/content").text.splitlines())
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in answers}


def main() -> None:
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=60, trust_env=False) as client:
        text = "\n".join(line(name, question) for name, question in QUESTIONS.items())
        for name, answer in run(client, text).items():
            print(f"{name}: {answer}")


if __name__ == "__main__":
    main()
