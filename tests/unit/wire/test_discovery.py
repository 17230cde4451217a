import msgspec

from penstock.wire.discovery import ReplicaMetadata, from_metadata, to_metadata
from penstock.wire.frames import PREVIOUS_PROTOCOL, Ability

METADATA = ReplicaMetadata("127.0.0.1:1234", "epoch", "pool", "digest", 2048, 16, abilities=(Ability.PROMPT_LOGPROBS,))


def test_what_a_replica_publishes_is_plain_data_that_comes_back() -> None:
    published = to_metadata(METADATA)

    assert msgspec.json.decode(msgspec.json.encode(published), type=ReplicaMetadata) == METADATA
    assert from_metadata(published) == METADATA


def test_a_replica_of_another_version_is_none() -> None:
    assert from_metadata({}) is None
    assert from_metadata({**to_metadata(METADATA), "max_model_len": "many"}) is None


def test_a_replica_that_publishes_no_protocol_is_of_the_version_before() -> None:
    published = to_metadata(METADATA)
    del published["protocol"]

    found = from_metadata(published)

    assert found is not None
    assert found.protocol == PREVIOUS_PROTOCOL
