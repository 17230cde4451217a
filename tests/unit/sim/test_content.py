import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.sim.content import Segment, SegmentMaker, make_keys, read_segments
from penstock_loadtest.planned import Planned
from penstock_loadtest.scenario import Prompts
from penstock_loadtest.workload.kinds import OWN, PREFIX
from penstock_loadtest.workload.trace_row import UNSHARED

segments = st.lists(st.builds(Segment, st.integers(0, 2), st.integers(1, 20), st.just(False)), max_size=6)


def tokens(content: list[Segment]) -> list[tuple[int, int]]:
    return [(segment.number, place) for segment in content for place in range(segment.num_tokens)]


def starts(content: list[Segment]) -> list[int]:
    """Places where a segment begins: equal tokens behind different borders are told apart."""
    return [sum(segment.num_tokens for segment in content[:place]) for place in range(len(content))]


@given(segments, segments, st.sampled_from([1, 4, 16]))
def test_blocks_have_a_key_in_common_exactly_where_all_tokens_up_to_their_end_are(
    first: list[Segment], second: list[Segment], size: int
) -> None:
    keys = [make_keys(content, size) for content in (first, second)]

    assert [len(each) for each in keys] == [len(tokens(content)) // size for content in (first, second)]
    for index, (ours, theirs) in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * size
        is_same = tokens(first)[:end] == tokens(second)[:end] and [place for place in starts(first) if place < end] == [
            place for place in starts(second) if place < end
        ]
        assert (ours == theirs) == is_same


def test_blocks_from_the_first_private_segment_on_have_no_keys() -> None:
    assert len(make_keys([Segment(1, 40), Segment(2, 100, is_private=True), Segment(1, 40)], 16)) == 2


def test_a_planned_prompt_is_read_back_as_its_segments() -> None:
    maker = SegmentMaker(Prompts(), 7)
    text = f"{maker.words(30, 0, PREFIX, 1)} {maker.words(12, 0, OWN, 5)}"
    blocks = Planned(index=0, at_s=0.0, max_tokens=1, prompt=maker.block_words([7, 8, UNSHARED + 3], 512, 1100))

    single = read_segments(Planned(index=0, at_s=0.0, max_tokens=1, prompt=text))
    turn = read_segments(Planned(index=0, at_s=0.0, max_tokens=1, prompt=text, session="1"))

    assert [(segment.num_tokens, segment.is_private) for segment in single] == [(30, False), (12, True)]
    assert [segment.is_private for segment in turn] == [False, False]
    assert read_segments(blocks) == [Segment(7, 512), Segment(8, 512), Segment(-1 - UNSHARED - 3, 76, True)]


def test_real_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="source is corpus"):
        SegmentMaker(Prompts(source="corpus", path="/somewhere"), 0)  # type: ignore[arg-type]
