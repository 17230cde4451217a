import hashlib

import pytest

from penstock.base.errors import ConfigError
from penstock.base.subsecrets import (
    block_secret,
    derive,
    format_replica_secrets,
    hkdf,
    parse_replica_secrets,
    replica_secrets,
    stream_secret,
)
from penstock.prefix.hashing import ChainHasher
from penstock.tenancy.keys import record_of
from penstock.tenancy.tenants import tenant_of

SECRET = bytes(range(32))


@pytest.mark.parametrize(
    ("secret", "salt", "info", "length", "material"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22,
            "",
            "",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)
def test_hkdf_gives_what_rfc_5869_says(secret: str, salt: str, info: str, length: int, material: str) -> None:
    found = hkdf(bytes.fromhex(secret), bytes.fromhex(salt), bytes.fromhex(info), length)

    assert found.hex() == material


def test_each_purpose_and_each_replica_has_a_secret_of_its_own_that_stays_the_same() -> None:
    one, other = stream_secret(SECRET, b"1" * 16), stream_secret(SECRET, b"2" * 16)

    assert block_secret(SECRET).hex() == "a9e1e4e58943a83276d28e6b3be963a610a19c19133c0616c114b4fdf602952a"
    assert one.hex() == "a04b7ed0cf0f9e067406e98feb29bd4372c5922f1a90946647b16669c66d252c"
    assert len({SECRET, block_secret(SECRET), one, other, derive(SECRET, "anything else")}) == 5


def test_two_replicas_agree_on_blocks_and_share_no_stream_secret() -> None:
    one, other = replica_secrets(SECRET), replica_secrets(SECRET)

    assert one.block == other.block
    assert one.stream != other.stream
    assert one.stream == stream_secret(SECRET, one.stream_key_id)


def test_keys_and_salts_that_were_made_before_there_were_sub_secrets_stay_valid() -> None:
    """The literals were computed by the version before."""
    name, record = record_of(SECRET, "acme", "sk-penstock-" + "ab" * 24)

    assert name == "penstock:key:{5268c978e2d1f8a91d9b120ea9111f1e0eb8d2cc}"
    assert record == b'{"tenant":"acme","revoked":false}'
    assert tenant_of(SECRET, "acme").salt.hex() == "bc746f1f576773ef6318f0b772a749eefb88b52b4638d1e966538cefaab4648a"


def test_replicas_of_two_versions_share_no_block_but_those_that_a_gateway_named_to_both() -> None:
    """A replica extends the chain that its gateway began: with another secret than the gateway's its own keys are
    found by nobody, and no key stands for other tokens or another parent than it says."""
    before, after = ChainHasher(SECRET, 4), ChainHasher(block_secret(SECRET), 4)
    token_ids = list(range(32))
    chains = [hasher.extend(hasher.add_salt(hasher.root("digest"), b"salt"), token_ids) for hasher in (before, after)]
    mixed = before.extend(chains[1][3], token_ids[16:])  # an old replica behind a new gateway's prompt

    assert len({*chains[0], *chains[1], *mixed}) == 8 + 8 + 4


def test_a_replicas_file_holds_its_secrets_and_comes_back() -> None:
    secrets = replica_secrets(SECRET)
    text = format_replica_secrets(secrets)

    assert parse_replica_secrets(text) == secrets
    assert SECRET.hex() not in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "block-secret 00",
        f"block-secret {'ab' * 32}\n",
        f"block-secret {'ab' * 32}\nstream-secret {'cd' * 31}\nstream-key-id {'ef' * 16}\n",
        f"block-secret {'ab' * 32}\nstream-secret nothex\nstream-key-id {'ef' * 16}\n",
    ],
    ids=["empty", "short", "one", "one short", "no hex"],
)
def test_a_file_that_lacks_one_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_replica_secrets(text)

    assert "ab" * 8 not in refused.value.message


def test_a_sub_secret_is_no_hash_that_the_cluster_secret_keys() -> None:
    assert derive(SECRET, "blocks") != hashlib.blake2b(b"blocks", key=SECRET, digest_size=32).digest()
