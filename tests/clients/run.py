"""`make clients`: unmodified clients do their everyday work against a platform on the demo model, and docs/clients.md
says what they did.

    python -m tests.clients.run [NAME ...]

A client is a script, `NAME.py` beside this file, that runs under a Python of its own: a virtual environment below
.penstock/clients, made of the pins in `pins/NAME.txt` and again only when those change. The script prints a line
`did: WORK` for each kind of work and `not: WORK, REASON` for what it can't do here; any other end than exit status 0 is
a failure, and the run's status is then 1. The rows of clients that are not named stay as they are.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.support.platform_process import running_platform
from penstock.text.export import save_tokenizer
from penstock.text.source import resolve
from tests.clients.table import Row, digest, read, replace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENTS = ROOT / ".penstock" / "clients"
SHARED = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
"""Packages of the platform's own environment, torch for the CPU among them."""
SCRIPT_S = 600.0
"""Longest run of a client, seconds."""
CONFIG = """
gateway: {{port: {port}}}
pools:
- {{name: demo, model: demo, served_names: [demo], replicas: 1}}
"""


class Client(NamedTuple):
    """A client of the table. package: its name on PyPI, whose version is in the table; None: it is no package."""

    name: str
    package: str | None
    path: str | None = None
    """Path of the API without which it can do nothing; None: what has always been there does."""
    is_sharing: bool = False
    """Whether it sees the packages of the platform's environment, so that torch is not installed twice."""
    interpreter: str | None = None
    """Environment variable that names its Python; None: it gets an environment of its own."""


CLIENTS = (
    Client("aiperf", "aiperf"),
    Client("anthropic", "anthropic", "/v1/messages"),
    Client("curl", None),
    Client("guidellm", "guidellm", is_sharing=True),
    Client("instructor", "instructor"),
    Client("langchain_anthropic", "langchain-anthropic", "/v1/messages"),
    Client("langchain_openai", "langchain-openai"),
    Client("litellm", "litellm"),
    Client("lm_eval", "lm-eval", is_sharing=True),
    Client("openai", "openai"),
    Client("vllm_bench", "vllm", interpreter="PENSTOCK_VLLM_PYTHON"),
)


class Server(NamedTuple):
    """The platform that clients meet. url: without /v1. tokenizer: a folder with its tokenizer, as transformers reads
    one."""

    url: str
    key: str
    tokenizer: Path


class ScriptFailed(Exception):
    """A client's script has ended with an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Clients against a platform; writes docs/clients.md")
    known = {client.name: client for client in CLIENTS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients to run; none: all of {', '.join(known)}")
    names = parser.parse_args(arguments).names or list(known)
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"there is no client {', '.join(unknown)}; there are {', '.join(known)}")
    pythons = {name: _python_of(known[name]) for name in names}
    with tempfile.TemporaryDirectory(prefix="penstock-clients-") as folder:
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        save_tokenizer(resolve("demo"), tokenizer)
        (tokenizer / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        with running_platform(Path(folder), CONFIG) as platform:
            document = httpx.get(f"{platform.url}/openapi.json", trust_env=False).json()
            server = Server(platform.url, platform.key, tokenizer)
            rows, failures = run_all([known[name] for name in names], pythons, server, document)
    page = PAGE.read_text(encoding="utf-8")
    others = [row for row in read(page) if row.client in known and row.client not in names]
    PAGE.write_text(replace(page, [*others, *rows]), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} rows; {failures} failures")
    return 1 if failures else 0


def run_all(
    clients: Sequence[Client],
    pythons: Mapping[str, Path | None],
    server: Server,
    document: Mapping[str, Any],
) -> tuple[list[Row], int]:
    """A row for each client, and how many failed. pythons: by client; None: there is none here, or its packages could
    not be installed."""
    rows, failures = [], 0
    for client in clients:
        python = pythons[client.name]
        if client.path is not None and client.path not in document["paths"]:
            did, did_not = [], [f"everything, the API has no {client.path} yet"]
        elif python is None and client.interpreter is not None:
            did, did_not = [], [f"everything, {client.interpreter} names no interpreter"]
        elif python is None:
            did, did_not, failures = [], ["failed: it could not be installed"], failures + 1
        else:
            try:
                did, did_not = _run(client, python, server)
            except ScriptFailed as error:
                did, did_not, failures = [], [f"failed: {error}"], failures + 1
        version = "" if python is None else _version(client, python)
        rows.append(Row(client.name, version, tuple(did), tuple(did_not), digest(document)))
        print(f"{client.name} {version}: {len(did)} kinds of work done, {len(did_not)} not", *did_not, sep="\n  ")
    return rows, failures


def _run(client: Client, python: Path, server: Server) -> tuple[list[str], list[str]]:
    """What the client did, and what not. Raises ScriptFailed."""
    with tempfile.TemporaryDirectory(prefix=f"penstock-{client.name}-") as folder:
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
        } | {
            "PENSTOCK_URL": server.url,
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_API_KEY": server.key,
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": server.key,
            "PENSTOCK_MODEL": "demo",
            "PENSTOCK_TOKENIZER": str(server.tokenizer),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": folder,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        }
        try:
            # -P: or `import openai` would find openai.py beside the script
            ended = subprocess.run(
                [python, "-P", HERE / f"{client.name}.py"],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=SCRIPT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ScriptFailed(f"it was not done after {SCRIPT_S:.0f} s") from None
    if ended.returncode:
        print(ended.stdout[-4000:], ended.stderr[-4000:], sep="\n", file=sys.stderr)
        last = (ended.stderr.strip() or ended.stdout.strip() or "without a word").splitlines()[-1]
        raise ScriptFailed(f"{last[:200]}")
    lines = ended.stdout.splitlines()
    return tuple([line.removeprefix(word) for line in lines if line.startswith(word)] for word in ("did: ", "not: "))


def _python_of(client: Client) -> Path | None:
    """The Python that runs the client, with its packages installed. Returns None if there is none, or they can't be
    installed."""
    if client.interpreter is not None:
        named = os.environ.get(client.interpreter)
        return None if named is None else Path(named)
    if client.package is None:
        return Path(sys.executable)
    pins = HERE / "pins" / f"{client.name}.txt"
    folder = ENVIRONMENTS / client.name
    stamp = folder / "installed"
    wanted = hashlib.sha256(f"{sys.version} {client.is_sharing}\n{pins.read_text(encoding='utf-8')}".encode())
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted.hexdigest():
        try:
            _install(client, folder, pins)
        except subprocess.CalledProcessError:
            return None
        stamp.write_text(wanted.hexdigest(), encoding="utf-8")
    return folder / "bin" / "python"


def _install(client: Client, folder: Path, pins: Path) -> None:
    """Raises CalledProcessError."""
    print(f"installing {client.name}: {', '.join(pins.read_text(encoding='utf-8').split())}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if client.is_sharing:
        packages = folder / "lib" / SHARED.parent.name / "site-packages"
        (packages / "platform.pth").write_text(f"{SHARED}\n", encoding="utf-8")
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, "install", "-q", "-r", pins], check=True)


def _version(client: Client, python: Path) -> str:
    if client.package is None:
        said = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
        return said.split()[1]
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    return subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
