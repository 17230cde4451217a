"""The engine as a worker of bench.engine, in a process that imports torch as a replica's does (`python -m
bench.support.engine_worker CONFIG`). CONFIG: an EngineConfig as JSON. What it answers: `engine_operations`."""

import sys
from collections.abc import Callable, Mapping

import msgspec

from bench.support.worker import answer
from penstock.workers.compute.lean_torch import import_torch
from penstock.workers.config import EngineConfig


def main() -> None:
    config = msgspec.json.decode(sys.argv[-1], type=EngineConfig)
    answer(lambda: start(config))


def start(config: EngineConfig) -> Mapping[str, Callable[..., object]]:
    """Load the engine; returns what it can be asked for."""
    import_torch(config.device)
    from bench.support.engine_operations import operations  # noqa: PLC0415 (imports torch)

    return operations(config)


if __name__ == "__main__":
    main()
