"""The namespaces of a request's blocks."""

from itertools import combinations

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
