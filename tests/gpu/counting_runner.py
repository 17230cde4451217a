"""A runner that counts the steps that are launched before the one before them has ended."""

from collections.abc import Callable

from penstock.workers.compute.runner import TorchRunner
from penstock.workers.engine.sequence import Sampled, Step


class CountingRunner(TorchRunner):
    """`num_ahead` counts them; there are none where `is_ahead` is False."""

    num_under_way = num_ahead = 0
    is_ahead = True

    def can_run_ahead(self, step: Step) -> bool:
        return self.is_ahead and super().can_run_ahead(step)

    def launch(self, step: Step) -> Callable[[], list[list[Sampled]]]:
        self.num_ahead += self.num_under_way
        wait = super().launch(step)
        self.num_under_way += 1

        def end() -> list[list[Sampled]]:
            self.num_under_way -= 1
            return wait()

        return end
