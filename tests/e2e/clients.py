"""Tenants, as the end-to-end tests need them inside the cluster's network: `python -m tests.e2e.clients NAME` reads
parameters as JSON from its standard input and prints what it found as JSON.
"""

import asyncio
import json
import os
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
TIMEOUT_S = 60.0
CA = "PENSTOCK_TEST_CA"
"""Variable that names the file of the CA of the API's certificate; without it the API speaks HTTP."""


def trusted() -> ssl.SSLContext | bool:
    """What clients check the API's certificate with. Its name is not checked: here the API is called by its address."""
    path = os.environ.get(CA)
    if path is None:
        return True
    context = ssl.create_default_context(cafile=path)
    context.check_hostname = False
    return context


def streamed(url: str, key: str, model: str) -> dict[str, Any]:
    """A chat through the unmodified openai client, as a stream."""
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        timeout=TIMEOUT_S,
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=trusted()),
    ) as client:
        stream = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=16, stream=True
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return {"text": text, "chunks": len(chunks)}


def status(url: str, key: str, path: str = "/v1/models") -> int:
    """Status of a GET."""
    return httpx.get(
        f"{url}{path}",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=trusted(),
    ).status_code


def refused(url: str) -> str:
    """The error of a GET that gets no answer; empty where there is one."""
    try:
        httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S, trust_env=False)
    except httpx.TransportError as error:
        return type(error).__name__
    return ""


def models(url: str, key: str) -> list[str]:
    """Names of the models that the API lists."""
    answer = httpx.get(
        f"{url}/v1/models",
        headers={"Authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=trusted(),
    )
    return [model["id"] for model in answer.raise_for_status().json()["data"]]


def page(url: str, path: str) -> str:
    """The text of a page."""
    return httpx.get(f"{url}{path}", timeout=TIMEOUT_S, trust_env=False, verify=trusted()).raise_for_status().text


def status_until(url: str, key: str, wanted: int, within_s: float) -> int:
    """Status of a GET, repeated until it is the one that is wanted or the time is over."""
    end = time.monotonic() + within_s
    while (found := status(url, key)) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    return found


def used(url: str, key: str) -> int:
    """Completion tokens, as the API tells the tenant."""
    answer = httpx.get(
        f"{url}/v1/usage",
        headers={"Authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
        trust_env=False,
        verify=trusted(),
    )
    return sum(row["completion_tokens"] for row in answer.raise_for_status().json()["data"])


def burst(url: str, key: str, model: str, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Runs `count` chats at once: status, tier and reason of each."""

    async def one(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
        messages = [
            {
                "role": "user",
                "content": f"Number {number}: "
                + "tell me a long story about rivers and the people who live on them. " * 4,
            }
        ]
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        return {
            "status": answer.status_code,
            "tier": answer.headers.get("x-penstock-tier"),
            "reason": answer.headers.get("x-penstock-tier-reason"),
        }

    async def main() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S, trust_env=False, verify=trusted()
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(count)))

    return asyncio.run(main())


def upload(url: str, key: str, adapter: str, base: str, folder: str) -> dict[str, Any]:
    """An adapter, a completion of it, and of its base."""
    headers = {"Authorization": f"Bearer {key}"}
    files = [("file", (path.name, path.read_bytes())) for path in sorted(Path(folder).iterdir())]
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=trusted()) as client:
        made = client.post("/v1/adapters", data={"name": adapter, "base_model": base}, files=files)
        of_adapter, of_base = (
            client.post(
                "/v1/completions", json={"model": model, "prompt": "The river", "max_tokens": 4, "temperature": 0}
            )
            for model in (made.json().get("id", adapter), base)
        )
    return {
        "made": [made.status_code, made.json()],
        "asked": [of_adapter.status_code, of_adapter.json()],
        "base": of_base.json(),
    }


CLIENTS: dict[str, Callable[..., Any]] = {
    client.__name__: client for client in (streamed, status, page, models, refused, status_until, used, burst, upload)
}

if __name__ == "__main__":
    json.dump(CLIENTS[sys.argv[1]](**json.load(sys.stdin)), sys.stdout)
