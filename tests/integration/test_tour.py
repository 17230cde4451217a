"""docs/tour.md and README's table of features: every command is run as it stands there, in a terminal and in order, and
its output compared.

The folder it happens in is a checkout made of links, so that `make up` starts what it starts for a reader, with a state
folder of its own; the ports that the documents name are replaced by free ones.
"""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.support.free_ports import free_port
from bench.support.platform_process import STOP_S
from tests.documents import INTERRUPT, Step, masked, matches, steps, table_commands

pytestmark = [pytest.mark.platform, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("8000", "9000", "4318")
"""Ports that the documents name: of gateway, provider and collector."""
NAMING_PORTS = ("penstock.yaml", "examples")
COPIED = (*NAMING_PORTS, "pyproject.toml", "constraints.txt")
"""Files that are copied: those that name ports, and what `make` compares with its stamps; the rest of the checkout is
links."""
STAYS = {"make up": "Ctrl-C stops it.", "penstock-loadtest fake-server": "http://"}
"""Commands that run until they are interrupted, each in a terminal of its own, and what they say when they are
ready."""
OF_MAKE = {"MFLAGS", "ARGS"}
"""What `make test ARGS=...` leaves in the environment, and another make would take up."""
NOT_RUN = {
    "make demo-autoscale": (
        "takes eight minutes; test_autoscale has a step with shorter horizons, test_autoscale_demo its begin and how "
        "it is interrupted, and the tour's load scales a pool too"
    ),
    "make image": "wants docker, podman or buildah; test_image runs an image where one is named",
    "PENSTOCK_VLLM_PYTHON=~/vllm/bin/python make test ARGS=tests/integration/test_vllm_pool.py": (
        "wants vLLM; is a test itself"
    ),
    "make gpu-tests": "wants an NVIDIA GPU",
}
"""Commands of README's table that are not run here, and why."""
SAYS = {
    '"The capital of France is"': '{"id":"cmpl-...":" Paris...',
    '"Why this replica?"': (
        "HTTP/1.1 200 OK...x-penstock-replica: ...x-penstock-cached-tokens: 0...x-penstock-predicted-ttft-ms: ..."
    ),
    "penstock tenant create team": "...│ team   │ 60           │ none       │ 4       │ all    │ edge_first  │...",
    "format=csv": "tenant,day,model,adapter,requests,prompt_tokens,cached_tokens,completion_tokens,cost,charge...",
    "penstock tenant create frugal": "...│ frugal ...│ 250 ...",
    "penstock plan": "...keys and values...TPOT...*  H100...",
    "penstock usage": "...│ acme ...│ demo ...│ tone ...",
    "/adapters": '...{"id":"tone",..."state":"loaded",...',
    "examples/tour/batch.py": "...completed: 3 of 3 lines...france: ...",
    "/metrics": '...penstock_replicas{pool="demo",tier="cloud"} ...',
    "/messages -H": '{"id":"msg_..."type":"message"..."stop_reason":..."output_tokens":...',
    "/v1}/docs": "<!doctype html>...<title>Penstock: the API</title>...",
    '"tick tock': '{"id":"cmpl-..."completion_tokens":16,...',
}
"""What commands say that stand only in README's table, by a part of them; dots and masks as in the tour."""
MADE = {"loadtest-results", "demo-autoscale", "build", "dist"}
"""Folders that commands make: not part of a checkout."""
DONE = "that was"
COMMAND_S = 600.0
START_S = 180.0


class Terminal:
    """A shell in a folder."""

    def __init__(self, folder: Path) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "OPENAI_", "OTEL_")) and name not in OF_MAKE
        }
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment | {"COLUMNS": "110", "NO_PROXY": "*", "no_proxy": "*"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._input, self._output = self._shell.stdin, self._shell.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)

    def type(self, command: str) -> None:
        self._input.write(f"{command}\n".encode())
        self._input.flush()

    def read_until(self, end: Callable[[str], bool], within_s: float) -> str:
        """Everything said until what was said meets `end`, or the shell ends."""
        deadline = time.monotonic() + within_s
        said = b""
        while not end(said.decode(errors="replace")):
            assert self._selector.select(deadline - time.monotonic()), (
                f"not within {within_s} s; so far:\n{said.decode(errors='replace')}"
            )
            piece = self._output.read()
            if not piece:
                break
            said += piece
        return said.decode()

    def run(self, command: str) -> tuple[str, int]:
        """What it says, and its exit status."""
        self.type(f'{command}\nprintf "\\n{DONE} %s\\n" $?')
        said = self.read_until(is_done, COMMAND_S)
        output, _, status = said.rstrip().rpartition(f"\n{DONE} ")
        assert status.isdigit(), f"{command} ended the terminal; it had said:\n{said}"
        return output, int(status)

    def interrupt(self) -> str:
        """Ctrl-C, to all that runs in it, and its end. What is said from then on."""
        os.killpg(self._shell.pid, signal.SIGINT)
        self._input.close()
        try:
            return self.read_until(lambda _: False, STOP_S)
        finally:
            self._shell.wait(STOP_S)
            self._selector.close()
            self._output.close()


def is_done(said: str) -> bool:
    return said.endswith("\n") and said.rstrip().rpartition("\n")[2].startswith(f"{DONE} ")


class Reader:
    """Does what the documents say: one terminal for commands, one for each that stays. `ports`: a free one for each of
    theirs."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self._folder = folder
        self._ports = ports
        self._terminal = Terminal(folder)
        self._staying: list[Terminal] = []

    def follow(self, step: Step) -> tuple[str, int]:
        """What it says, with the documents' ports, and its exit status."""
        output, status = self._do(replaced(step.command, self._ports))
        return replaced(output, {ours: port for port, ours in self._ports.items()}), status

    def _do(self, command: str) -> tuple[str, int]:
        if command == INTERRUPT:
            return self._staying.pop().interrupt(), 0
        ready = ready_text(command)
        if ready is None:
            return self._terminal.run(command)
        self._staying.append(Terminal(self._folder))
        self._staying[-1].type(f"PATH=$PWD/.venv/bin:$PATH; {command}")
        said = self._staying[-1].read_until(lambda text: ready in text and text.endswith("\n"), START_S)
        return "".join(
            line for line in said.splitlines(True) if not line.startswith("... ")
        ), 0  # a spinner, where the terminal is a real one

    def close(self) -> None:
        for terminal in (self._terminal, *reversed(self._staying)):
            terminal.interrupt()


def replaced(text: str, ports: dict[str, str]) -> str:
    for port, ours in ports.items():
        text = text.replace(port, ours)
    return text


def ready_text(command: str) -> str | None:
    """What a command that stays says when it is ready; None for others."""
    return next((ready for beginning, ready in STAYS.items() if command.startswith(beginning)), None)


def checkout(folder: Path, ports: dict[str, str]) -> Path:
    """A checkout as `make loadtest` leaves one, with other ports."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy(path, folder)
        elif not path.name.startswith(".") and path.name not in MADE:
            (folder / path.name).symlink_to(path)
    for name in NAMING_PORTS:
        for path in [folder / name, *(folder / name).rglob("*")]:
            if path.is_file():
                path.write_text(replaced(path.read_text(encoding="utf-8"), ports), encoding="utf-8")
    environment = folder / ".venv"
    environment.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".installed"):
            (environment / path.name).symlink_to(path)
    for stamp in (".installed", ".installed-loadtest"):
        (environment / stamp).touch()
    planned = subprocess.run(
        ["make", "-n", "up", "loadtest"], cwd=folder, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert "pip" not in planned, "what it would install, it would install for the tests that run"
    return folder


def in_order(tour: list[Step], table: list[Step]) -> list[Step]:
    """The tour, and before each Ctrl-C the table's commands that want what it ends and that the tour does not have
    itself."""
    known, wants = {step.command for step in tour} | NOT_RUN.keys(), ""
    beside: dict[str, list[Step]] = {}
    for row in table:
        if ready_text(row.command) is not None:
            wants = row.command
        elif row.command not in known:
            beside.setdefault(wants, []).append(row)
    found: list[Step] = []
    running: list[str] = []
    for step in tour:
        if ready_text(step.command) is not None:
            running.append(step.command)
        elif step.command == INTERRUPT:
            found += beside.pop(running.pop(), [])
        found.append(step)
    assert not beside, f"commands of README's table that nothing runs: {beside}"
    return found


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    ports = {port: str(free_port()) for port in PORTS}
    reader = Reader(checkout(tmp_path, ports), ports)
    yield reader
    reader.close()


@pytest.mark.slow
def test_every_command_of_the_tour_and_of_the_table_says_what_the_documents_say(
    reader: Reader, record_property: Callable[[str, object], None]
) -> None:
    differences, slowest = [], []
    for step in in_order(tour(), table()):
        began = time.monotonic()
        output, status = reader.follow(step)
        slowest.append((round(time.monotonic() - began, 1), step.command.splitlines()[0][:60]))
        expected = says(step.command) if step.expected is None else step.expected
        if status != 0 or not matches(expected, output):
            differences.append(
                f"line {step.line}, status {status}: {step.command}\n--- expected\n{masked(expected)}\n"
                f"--- came\n{masked(output)}\n"
            )

    record_property("seconds", sorted(slowest, reverse=True)[:12])
    assert not differences, "\n".join(differences)


def test_the_lists_of_this_test_are_about_the_table_as_it_is() -> None:
    commands = {step.command for step in table()}
    own = commands - NOT_RUN.keys() - {step.command for step in tour()}

    assert NOT_RUN.keys() <= commands
    assert len(own) == len(SAYS)
    assert all(says(command) for command in own)


def says(command: str) -> str:
    (found,) = (expected for part, expected in SAYS.items() if part in command)
    return found


def tour() -> list[Step]:
    return steps((ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))


def table() -> list[Step]:
    return table_commands((ROOT / "README.md").read_text(encoding="utf-8"))
