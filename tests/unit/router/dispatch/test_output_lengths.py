from penstock.router.dispatch.output_lengths import FIRST_OUTPUT_TOKENS, OutputLengths


def test_before_any_answer_a_length_is_assumed() -> None:
    assert OutputLengths().expect(("a",)) == FIRST_OUTPUT_TOKENS


def test_the_expectation_follows_the_answers_of_these_pools_alone() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        lengths.learn(("a",), 10)

    assert 10 <= lengths.expect(("a",)) < 11
    assert lengths.expect(("b",)) == FIRST_OUTPUT_TOKENS
