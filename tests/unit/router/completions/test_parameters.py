import msgspec
import pytest

from penstock.router.completions.parameters import bound_max_tokens, sampling_for_choice, sampling_params, stop_strings
from penstock.wire.bodies import decode_chat, decode_completion
from penstock.wire.errors import ContextTooLong, InvalidRequest
from penstock.wire.frames import SamplingParams
from penstock.wire.openai import ChatRequest, CompletionRequest


def chat(**fields: object) -> ChatRequest:
    return decode_chat(msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}))


def completion(**fields: object) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"model": "m", "prompt": "x", **fields}))


def test_defaults_are_openais() -> None:
    assert sampling_params(chat(), 7, 100) == SamplingParams(max_tokens=0, seed=7)


def test_every_parameter_reaches_the_engine() -> None:
    request = chat(
        max_tokens=9, seed=5, temperature=0, top_k=3, top_p=0.5, min_p=0.1,
        repetition_penalty=1.1, frequency_penalty=-1, presence_penalty=2,
        logit_bias={"4": -100}, stop_token_ids=[8], ignore_eos=True, min_tokens=2, logprobs=True, top_logprobs=4,
    )  # fmt: skip

    assert sampling_params(request, 7, 100) == SamplingParams(
        9, 5, 0.0, 3, 0.5, 0.1, 1.1, -1.0, 2.0, ((4, -100.0),), (8,), True, 2, 4
    )


@pytest.mark.parametrize(("wanted", "taken"), [(1e-46, 0.0), (9.9e-6, 0.0), (0, 0.0), (1e-5, 1e-5), (0.7, 0.7)])
def test_a_temperature_too_small_to_divide_by_is_greedy(wanted: float, taken: float) -> None:
    assert sampling_params(chat(temperature=wanted), 0, 100).temperature == taken


@pytest.mark.parametrize(("wanted", "taken"), [(-1, 0), (0, 0), (99, 99), (100, 0), (2**64, 0), (10**30, 0)])
def test_a_top_k_of_the_whole_vocabulary_or_more_is_none(wanted: int, taken: int) -> None:
    sampling = sampling_params(chat(top_k=wanted), 0, 100)

    assert sampling.top_k == taken
    assert msgspec.msgpack.encode(sampling), "a stream's message holds integers of 64 bits at most"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", "1e-40"), ("repetition_penalty", "0"), ("repetition_penalty", "11"),
        ("temperature", "-0.1"), ("temperature", "1e999"), ("temperature", "NaN"), ("top_p", "1.1"),
        ("min_p", "-0.1"), ("frequency_penalty", "2.1"), ("presence_penalty", "-2.1"),
        ("logit_bias", '{"1": 101}'), ("logit_bias", '{"1": -1e999}'), ("logit_bias", '{"1": Infinity}'),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_completion(f'{{"model": "m", "prompt": "x", "{name}": {value}}}'.encode())


@pytest.mark.parametrize(
    ("request_", "logprobs"),
    [
        (chat(), None),
        (chat(logprobs=False), None),
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=2), 2),
        (completion(), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=3), 3),
    ],
)
def test_logprobs_of_both_endpoints(request_: ChatRequest | CompletionRequest, logprobs: int | None) -> None:
    assert sampling_params(request_, 0, 100).logprobs == logprobs


def test_top_logprobs_without_logprobs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs 'logprobs'"):
        sampling_params(chat(top_logprobs=2), 0, 100)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_any_seed_becomes_one_the_engine_takes(seed: int) -> None:
    assert 0 <= sampling_params(chat(seed=seed), 0, 100).seed < 2**63


@pytest.mark.parametrize("fields", [{"logit_bias": {"100": 1}}, {"stop_token_ids": [100]}, {"logit_bias": {"-1": 1}}])
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"token ids lie in 0\.\.99") as caught:
        sampling_params(chat(**fields), 0, 100)

    assert caught.value.param in fields


def test_the_two_names_of_max_tokens_must_agree() -> None:
    assert sampling_params(chat(max_completion_tokens=5, max_tokens=5), 0, 100).max_tokens == 5
    assert sampling_params(chat(max_completion_tokens=6), 0, 100).max_tokens == 6
    with pytest.raises(InvalidRequest, match="contradict"):
        sampling_params(chat(max_completion_tokens=5, max_tokens=6), 0, 100)


@pytest.mark.parametrize(("wanted", "prompt", "granted"), [(0, 10, 20), (0, 90, 10), (10, 90, 10), (5, 90, 5)])
def test_the_answer_fits_behind_the_prompt(wanted: int, prompt: int, granted: int) -> None:
    assert bound_max_tokens(SamplingParams(wanted), prompt, 100, default_max_tokens=20).max_tokens == granted


@pytest.mark.parametrize(("wanted", "prompt"), [(11, 90), (0, 100), (0, 1000)])
def test_a_request_beyond_the_context_is_refused_with_its_numbers(wanted: int, prompt: int) -> None:
    with pytest.raises(
        ContextTooLong,
        match=f"maximum context length is 100 tokens.*{prompt + max(wanted, 1)} tokens.*{prompt} in the prompt",
    ):
        bound_max_tokens(SamplingParams(wanted), prompt, 100, default_max_tokens=20)


def test_min_tokens_beyond_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        bound_max_tokens(SamplingParams(5, min_tokens=6), 10, 100, default_max_tokens=20)


def test_siblings_have_seeds_of_their_own_that_depend_on_the_request_alone() -> None:
    seeds = [sampling_for_choice(SamplingParams(5, seed=3), index).seed for index in range(5)]

    assert seeds[0] == 3
    assert len(set(seeds)) == 5
    assert seeds == [sampling_for_choice(SamplingParams(5, seed=3), index).seed for index in range(5)]
    assert sampling_for_choice(SamplingParams(5, seed=4), 1).seed not in seeds


def test_stop_is_one_string_or_several() -> None:
    assert [stop_strings(chat(stop=stop)) for stop in (None, "a", ["a", "b"], [])] == [(), ("a",), ("a", "b"), ()]
