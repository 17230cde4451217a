import pytest

from penstock.wire.frames import Hello
from penstock.wire.proof import is_proved, make_hello

SECRET, OTHER = b"s" * 32, b"t" * 32


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
