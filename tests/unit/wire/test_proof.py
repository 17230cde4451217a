import pytest

from penstock.wire.frames import PROTOCOL_VERSION, Hello
from penstock.wire.proof import (
    NONCE_BYTES,
    Opening,
    StreamProofs,
    decode_opening,
    encode_opening,
    is_proved,
    make_hello,
    make_nonce,
)

SECRET, OTHER = b"s" * 32, b"t" * 32
OURS, THEIRS, ANOTHER = b"o" * NONCE_BYTES, b"t" * NONCE_BYTES, b"a" * NONCE_BYTES
OPENING = Opening("gateway-1", OURS)
PROOFS = StreamProofs(SECRET, OPENING, "epoch", THEIRS)


def test_both_ends_make_the_same_proofs_of_one_connection() -> None:
    there = StreamProofs(SECRET, Opening("gateway-1", OURS), "epoch", THEIRS)

    assert (PROOFS.router, PROOFS.replica) == (there.router, there.replica)


@pytest.mark.parametrize(
    "others",
    [
        StreamProofs(OTHER, OPENING, "epoch", THEIRS),
        StreamProofs(SECRET, OPENING, "another epoch", THEIRS),
        StreamProofs(SECRET, Opening("gateway-2", OURS), "epoch", THEIRS),
        StreamProofs(SECRET, Opening("gateway-1", ANOTHER), "epoch", THEIRS),
        StreamProofs(SECRET, OPENING, "epoch", ANOTHER),
        StreamProofs(SECRET, Opening("gateway-1", THEIRS), "epoch", OURS),
        StreamProofs(SECRET, Opening("gateway-1", OURS, PROTOCOL_VERSION + 1), "epoch", THEIRS),
        StreamProofs(SECRET, Opening("gateway-1e", OURS), "poch", THEIRS),
    ],
    ids=[
        "another secret",
        "another process",
        "another router",
        "another connection of the router",
        "another connection of the replica",
        "nonces reflected",
        "another protocol",
        "parts moved",
    ],
)
def test_no_proof_holds_for_anything_else(others: StreamProofs) -> None:
    assert len({PROOFS.router, PROOFS.replica, others.router, others.replica}) == 4


def test_a_proof_of_one_role_is_none_of_the_other() -> None:
    assert PROOFS.router != PROOFS.replica


def test_nonces_are_long_and_never_the_same() -> None:
    nonces = {make_nonce() for _ in range(100)}

    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}


def test_what_is_no_message_of_an_opening_is_none() -> None:
    assert decode_opening(encode_opening(OPENING)) == OPENING
    assert decode_opening(b"GET / HTTP/1.1") is None
    assert decode_opening(encode_opening(OPENING)[:-1]) is None


# the hello of the version before


def test_who_knows_the_secret_proves_it_to_that_process() -> None:
    assert is_proved(make_hello(SECRET, "gateway-1", "epoch"), SECRET, "epoch")


@pytest.mark.parametrize(
    "hello",
    [
        Hello("gateway-1"),
        make_hello(OTHER, "gateway-1", "epoch"),
        make_hello(SECRET, "gateway-1", "another epoch"),
        Hello("gateway-2", proof=make_hello(SECRET, "gateway-1", "epoch").proof),
        Hello("gateway-1 epoch", proof=make_hello(SECRET, "gateway-1", "epoch epoch").proof),
    ],
    ids=["no proof", "another secret", "another process", "another router", "parts moved"],
)
def test_nothing_else_is_a_proof(hello: Hello) -> None:
    assert not is_proved(hello, SECRET, "epoch")


def test_the_secret_does_not_travel() -> None:
    assert SECRET not in make_hello(SECRET, "gateway-1", "epoch").proof
    assert SECRET not in PROOFS.router + PROOFS.replica
