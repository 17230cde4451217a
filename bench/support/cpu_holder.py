"""Another job on a platform's Ray, which takes all processors but those of so many more replicas:

    python -m bench.support.cpu_holder ADDRESS FOLDER REPLICAS

ADDRESS is of Ray's global control store, FOLDER where its sessions are. Says `held` when it has them, and gives them
back when its input ends.
"""

import logging
import sys
from typing import Any

import ray

from penstock.base.serve_options import NUM_CPUS


class Holder:
    """Holds what it was started with."""

    def is_there(self) -> bool:
        return True


def main() -> None:
    address, folder, replicas = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(address=address, namespace="other", logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder)
    free = ray.available_resources()["CPU"] - replicas * NUM_CPUS
    holder: Any = ray.remote(num_cpus=round(free, 4))(Holder).remote()
    assert ray.get(holder.is_there.remote(), timeout=60)
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
