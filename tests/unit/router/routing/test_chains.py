"""The namespaces of a request's blocks."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from penstock.prefix.hashing import ChainHasher
from penstock.router.routing.chains import ChainKind, Chains
from penstock.wire.frames import pack_token_ids

SECRET = b"0123456789abcdef"
KIND = ChainKind("digest", 4)
IDS = pack_token_ids(range(16))


def test_no_block_is_shared_between_adapters_their_versions_or_the_base() -> None:
    chains = Chains(SECRET)

    found = [chains.make(KIND, b"salt", IDS, adapter) for adapter in (None, "a" * 32, "b" * 32)]

    for first, second in combinations(found, 2):
        assert not set(first.keys) & set(second.keys)
        assert first.parent != second.parent
    assert chains.make(KIND, b"salt", IDS, "a" * 32) == found[1]


def test_two_tenants_with_the_same_adapter_share_no_block_either() -> None:
    chains = Chains(SECRET)

    assert not set(chains.make(KIND, b"one", IDS, "a" * 32).keys) & set(chains.make(KIND, b"other", IDS, "a" * 32).keys)


def test_a_chain_with_an_adapter_goes_on_as_the_replica_goes_on() -> None:
    chains = Chains(SECRET)
    short = chains.make(KIND, b"salt", IDS[: 8 * 4], "a" * 32)

    whole = chains.make(KIND, b"salt", IDS, "a" * 32)

    assert chains.extend(short, KIND, IDS) == whole
    assert short.keys + ChainHasher(SECRET, 4).extend(short.parent, range(8, 16)) == whole.keys


def published(*prefixes: range) -> Chains:
    chains = Chains(SECRET)
    chains.publish({KIND.model_digest: [pack_token_ids(prefix) for prefix in prefixes]})
    return chains


def test_the_full_blocks_of_a_published_prefix_are_the_same_for_all_and_what_follows_is_nobody_elses() -> None:
    chains = published(range(10))  # two full blocks of four, and a rest

    one, other = (chains.make(KIND, salt, IDS) for salt in (b"one", b"other"))

    assert (
        one.keys[:2] == other.keys[:2] == ChainHasher(SECRET, 4).extend(ChainHasher(SECRET, 4).root("digest"), range(8))
    )
    assert not set(one.keys[2:]) & set(other.keys[2:])
    assert len(one.keys) == 4
    assert one.parent != other.parent


def test_a_prompt_that_ends_with_the_published_prefix_goes_on_in_private() -> None:
    chains = published(range(8))

    one, other = (chains.make(KIND, salt, IDS[: 8 * 4]) for salt in (b"one", b"other"))

    assert one.keys == other.keys
    assert one.parent != other.parent
    assert chains.extend(one, KIND, IDS) == chains.make(KIND, b"one", IDS)
    assert one.keys + ChainHasher(SECRET, 4).extend(one.parent, range(8, 16)) == chains.make(KIND, b"one", IDS).keys


def test_a_prompt_that_leaves_the_prefix_before_its_last_full_block_shares_nothing() -> None:
    chains = published(range(10))
    private = Chains(SECRET).make(KIND, b"one", IDS[: 7 * 4] + IDS[:36])

    assert chains.make(KIND, b"one", IDS[: 7 * 4] + IDS[:36]) == private
    assert chains.make(KIND, b"one", IDS[4:]) == Chains(SECRET).make(KIND, b"one", IDS[4:])


def test_what_is_published_for_one_model_or_less_than_a_block_or_withdrawn_is_shared_by_no_other() -> None:
    private = Chains(SECRET).make(KIND, b"one", IDS)
    chains = published(range(3))
    assert chains.make(KIND, b"one", IDS) == private
    chains.publish({"another": [IDS]})
    assert chains.make(KIND, b"one", IDS) == private
    chains.publish({KIND.model_digest: [IDS]})
    assert chains.make(KIND, b"one", IDS) != private
    chains.publish({})

    assert chains.make(KIND, b"one", IDS) == private


def test_an_adapter_has_no_public_blocks() -> None:
    """Two tenants may have brought the same adapter."""
    chains = published(range(16))

    assert chains.make(KIND, b"one", IDS, "a" * 32) == Chains(SECRET).make(KIND, b"one", IDS, "a" * 32)


def test_of_several_published_prefixes_the_longest_counts() -> None:
    chains = published(range(4), range(12), range(8), range(100, 108))

    one, other = (chains.make(KIND, salt, IDS) for salt in (b"one", b"other"))

    assert [first == second for first, second in zip(one.keys, other.keys, strict=True)] == [True, True, True, False]


@given(
    prefix=st.lists(st.integers(0, 1), max_size=24),
    prompt=st.lists(st.integers(0, 1), max_size=24),
    is_following=st.booleans(),
)
def test_two_tenants_never_share_more_than_the_published_blocks(
    prefix: list[int], prompt: list[int], is_following: bool
) -> None:
    chains = published(range(0))
    chains.publish({KIND.model_digest: [pack_token_ids(prefix)]})
    packed = pack_token_ids([*prefix, *prompt] if is_following else prompt)

    one, other = (chains.make(KIND, salt, packed) for salt in (b"one", b"other"))

    num_public = len(prefix) // 4 if packed.startswith(pack_token_ids(prefix[: len(prefix) // 4 * 4])) else 0
    assert [first == second for first, second in zip(one.keys, other.keys, strict=True)] == [
        number < num_public for number in range(len(packed) // 16)
    ]
    assert one.parent != other.parent


def test_where_tenants_share_nothing_a_published_prefix_is_each_tenants_own() -> None:
    chains = published(range(10))
    private = ChainKind("digest", 4, is_private=True)

    one, other = (chains.make(private, salt, IDS) for salt in (b"one", b"other"))

    assert not set(one.keys) & set(other.keys)
    assert not set(one.keys) & set(chains.make(KIND, b"one", IDS).keys)
    assert one == chains.make(private, b"one", IDS) == Chains(SECRET).make(KIND, b"one", IDS)
