"""The gateway's choice of a replica, held against the search through all of them at each decision of a simulation."""

from collections.abc import Sequence
from random import Random

from penstock.router.replicas.routing_policy import RoutedRequest, production
from penstock.router.routing.native_search import open_search
from penstock.router.routing.policy import Decision, ReplicaView, choose, score_again


class ComparedDecisions:
    """A routing policy that decides as the gateway does, and by the whole search beside it; both draw alike."""

    def __init__(self, seed: str) -> None:
        self.num_decided = self.num_equal = 0
        self.costs: list[float] = []
        """Predicted cost of each choice, as a multiple of that of the whole search's."""
        self._chooses = production(Random(seed), open_search())
        self._random = Random(seed)

    @property
    def equal(self) -> float:
        """Part of the decisions for the same replica."""
        return self.num_equal / self.num_decided

    def __call__(self, request: RoutedRequest, views: Sequence[ReplicaView]) -> Decision:
        wanted = choose(request.num_tokens, request.expected_output_tokens, list(views), self._random)
        found = self._chooses(request, views)
        self.num_decided += 1
        self.num_equal += found.replica_id == wanted.replica_id
        if found.replica_id is not None and wanted.basis is not None:
            basis = wanted.basis.read()
            compared = {each.replica_id: each for each in basis.compared}
            cost_s, best_s = (
                score_again(basis, compared[each]).cost_s for each in (found.replica_id, str(wanted.replica_id))
            )
            self.costs.append(cost_s / best_s)
        return found
