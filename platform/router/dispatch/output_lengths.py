"""How long the answers are that each set of pools gives: a running mean, from which the length of the next is expected.
Pure."""

FIRST_OUTPUT_TOKENS = 128.0
"""Expected length of an answer before any has finished."""
OUTPUT_TOKENS_RATE = 0.02
"""Weight of the latest answer in that expectation."""


class OutputLengths:
    def __init__(self) -> None:
        self._means: dict[tuple[str, ...], float] = {}

    def expect(self, pools: tuple[str, ...]) -> float:
        """Tokens of an answer by these pools."""
        return self._means.get(pools, FIRST_OUTPUT_TOKENS)

    def learn(self, pools: tuple[str, ...], num_tokens: int) -> None:
        """Take in an answer that finished."""
        mean = self.expect(pools)
        self._means[pools] = mean + OUTPUT_TOKENS_RATE * (num_tokens - mean)
