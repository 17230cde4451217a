"""The choices of a request that generates more than it returns (`best_of`): of each prompt those with the highest log
probability per token, as OpenAI's API has it. Pure."""

import heapq
from collections.abc import Iterable, Iterator

from penstock.router.completions.formats import FinishedChoice


def select_best(choices: Iterable[FinishedChoice], num_generated: int, num_returned: int) -> Iterator[FinishedChoice]:
    """The best choices of each prompt, numbered anew through all prompts; of equals the first.

    choices: in the order of their numbers, `num_generated` for each prompt, with log probabilities.
    """
    of_prompt: list[FinishedChoice] = []
    index = 0
    for choice in choices:
        of_prompt.append(choice)
        if len(of_prompt) < num_generated:
            continue
        for best in heapq.nlargest(num_returned, of_prompt, key=mean_logprob):
            best.index = index
            index += 1
            yield best
        of_prompt = []


def mean_logprob(choice: FinishedChoice) -> float:
    """Log probability per token; minus infinity for a choice without any."""
    if not choice.logprobs:
        return float("-inf")
    return sum([item.logprob for item in choice.logprobs]) / len(choice.logprobs)
