from typing import Any

from penstock.wire.frames import SamplingParams, TokenLogprobs, unpack_token_ids
from penstock.workers.engine.sequence import Sequence
from penstock.workers.vllm.bridge import Logprob
from penstock.workers.vllm.request import VllmAdapter, find_refusal, make_add, make_logprobs, make_sampling

EOS = frozenset({2, 0})


def sequence(num_output_tokens: int = 0, **sampling: Any) -> Sequence:
    params = SamplingParams(**({"max_tokens": 40} | sampling))
    return Sequence("q", list(range(20)), params, 20 - num_output_tokens, [], b"", 0.0, tenant="acme")


def test_every_parameter_of_ours_reaches_vllm() -> None:
    seq = sequence(
        seed=11,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        logit_bias=((7, -1.0), (8, 2.0)),
        stop_token_ids=(9,),
        min_tokens=3,
        logprobs=4,
    )

    assert make_sampling(seq, EOS) == {
        "max_tokens": 40,
        "seed": 11,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {7: -1.0, 8: 2.0},
        "stop_token_ids": [0, 2, 9],
        "ignore_eos": True,
        "min_tokens": 3,
        "logprobs": 4,
    }


def test_a_field_that_sampling_params_gains_is_not_forgotten_here() -> None:
    args = set(make_sampling(sequence(logit_bias=((1, 1.0),)), EOS))
    refused: dict[str, Any] = {
        "prompt_logprobs": 0,
        "allowed_token_ids": b"abcd",
        "bad_words": ((5,),),
        "num_beams": 2,
    }

    assert all(find_refusal(sequence(**{name: value})) for name, value in refused.items())
    # vLLM tells the log probabilities of all tokens, also where only the first ones are asked for
    unused = {"num_returned", "length_penalty", "logprobs_tokens"}
    assert args | {*refused, *unused} == set(SamplingParams.__struct_fields__)


def test_greedy_needs_no_seed_and_ignored_ends_are_no_stops() -> None:
    found = make_sampling(sequence(temperature=0.0, ignore_eos=True, stop_token_ids=(9,)), EOS)

    assert "seed" not in found
    assert found["stop_token_ids"] == [9]


def test_bounds_of_a_resumed_sequence_count_what_is_left_and_its_noise_is_not_that_of_its_beginning() -> None:
    found = make_sampling(sequence(6, seed=2**63 - 1, min_tokens=10), EOS)

    assert (found["max_tokens"], found["min_tokens"], found["seed"]) == (34, 4, 5)
    assert make_sampling(sequence(6, min_tokens=3), EOS)["min_tokens"] == 0


def test_cached_kv_is_shared_inside_a_tenant_only() -> None:
    seq, other = sequence(), sequence()
    other.tenant = "umbrella"
    first, again, others = make_add(seq, 1, EOS), make_add(seq, 2, EOS), make_add(other, 3, EOS)

    assert unpack_token_ids(first.packed_token_ids) == seq.token_ids
    assert first.cache_salt == again.cache_salt
    assert first.cache_salt != others.cache_salt


def test_only_an_adapter_is_refused() -> None:
    seq = sequence()
    assert find_refusal(seq) is None
    seq.adapter = "0123"

    assert "0123" in (find_refusal(seq) or "")


def test_the_chosen_token_is_not_among_the_likeliest_unless_it_is() -> None:
    found = [Logprob(-3.0, [(5, -0.1), (6, -2.0), (7, -3.0)])]

    assert make_logprobs(found, 2) == [TokenLogprobs(-3.0, ((5, -0.1), (6, -2.0)))]
    assert make_logprobs(found, 0) == [TokenLogprobs(-3.0)]
    assert make_logprobs(found, None) is None
    assert make_logprobs(None, 2) is None


def test_a_salt_of_the_requests_own_is_beside_the_tenants() -> None:
    seq = sequence()
    seq.cache_scope = "0123"

    assert make_add(sequence(), 1, EOS).cache_salt == "tenant:acme"
    assert make_add(seq, 1, EOS).cache_salt == "tenant:acme:0123"


def test_a_sequence_names_the_number_of_its_loaded_adapter() -> None:
    plain, adapted = sequence(), sequence()
    adapted.adapter, adapted.lora = "digest", VllmAdapter("digest", 5)

    assert (make_add(plain, 1, EOS).adapter, make_add(adapted, 2, EOS).adapter) == (None, 5)
    assert find_refusal(adapted) is None
    adapted.lora = None
    assert "engine.adapters.slots" in (find_refusal(adapted) or "")
