"""Lists on a device against the tokens of their sequences."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.frames import SamplingParams
from penstock.workers.compute.adjustments import TokenCounts
from penstock.workers.compute.triton.sampling.count_lists import ENTRY_BYTES, SHORTEST, CountLists
from penstock.workers.compute.triton.sampling.sampling_inputs import Located
from penstock.workers.engine.sequence import Sequence

VOCAB = 3 * SHORTEST


class Host:
    """A sequence, its counts, and the lists of a device that is the CPU."""

    def __init__(self, lists: CountLists, prompt: list[int]) -> None:
        self.lists = lists
        self.seq = Sequence("r", prompt, SamplingParams(max_tokens=9), len(prompt), [], b"", 0.0)
        self.counts = TokenCounts()

    def locate(self) -> Located:
        """Have the list changed, as a step does."""
        self.counts.update(self.seq)
        located = self.lists.locate(self.counts.listed(self.seq))
        places = torch.from_numpy((located.targets - located.address) // ENTRY_BYTES)
        self._memory().index_copy_(0, places, torch.from_numpy(located.entries))
        return located

    def check(self) -> None:
        located = self.locate()
        size = self.counts.listed(self.seq).size
        entries = self._memory()[:size].numpy()
        num_known = self.seq.num_tokens - (self.seq.unknown_row is not None)
        produced = Counter(self.seq.token_ids[self.seq.num_prompt_tokens : num_known])

        assert located.address == self._memory().data_ptr()
        assert dict(zip((entries & 0xFFFFFFFF).tolist(), (entries >> 32).tolist(), strict=True)) == {
            token_id: produced[token_id] for token_id in self.seq.token_ids[:num_known]
        }

    def _memory(self) -> torch.Tensor:
        return self.lists._lists[self.seq].memory


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.lists(st.sampled_from(["grow", "burst", "clear", "forget", "retract"]), max_size=9)
)
def test_lists_have_what_is_known_of_their_sequences_whatever_happens(seed: int, events: list[str]) -> None:
    draw, lists = np.random.default_rng(seed), CountLists(torch.device("cpu"))
    hosts = [Host(lists, draw.integers(VOCAB, size=draw.integers(1, 2 * SHORTEST)).tolist()) for _ in range(3)]
    for name in events:
        host = hosts[draw.integers(3)]
        if host.seq.unknown_row is not None:
            host.seq.token_ids[-1] = int(draw.integers(VOCAB))
        if name == "grow":
            host.seq.token_ids.append(-1 - 5)
        elif name == "burst":
            host.seq.token_ids += draw.integers(VOCAB, size=2 * SHORTEST).tolist()
        elif name == "clear":
            lists.clear()
        elif name == "forget":
            lists.forget(host.seq)
        else:
            host.seq.token_ids.append(-1)
            host.check()
            del host.seq.token_ids[-1]
        host.check()

    for host in hosts:
        host.check()


def test_a_step_sends_one_entry_for_a_sequence_that_decodes() -> None:
    lists = CountLists(torch.device("cpu"))
    host = Host(lists, [*range(2000)])
    sizes = [len(host.locate().targets)]
    for token_id in (5, 5, 7000):
        host.seq.token_ids.append(token_id)
        sizes.append(len(host.locate().targets))

    assert sizes == [2000, 1, 1, 1]
    assert lists.num_bytes == 2048 * ENTRY_BYTES
    lists.forget(host.seq)
    lists.forget(host.seq)
    assert lists.num_bytes == 0
