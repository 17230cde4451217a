"""Step costs of an engine on this machine as its own probe finds them, in a process of its own: `python -m
bench.support.probed_costs MODEL CONFIG CORES`.

CONFIG: an EngineConfig as JSON; CORES: the cores to run on, like 1 or 0,1. Prints the costs as a JSON object.
"""

import os
import sys

import msgspec

from penstock.text.source import resolve
from penstock.workers.compute.loading import load_runner
from penstock.workers.config import EngineConfig
from penstock.workers.engine.probe import measure


def main() -> None:
    model, settings, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    config = msgspec.json.decode(settings, type=EngineConfig)
    print(msgspec.json.encode(measure(load_runner(resolve(model), config), config)).decode())


if __name__ == "__main__":
    main()
