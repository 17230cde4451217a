import pytest

from penstock.wire.frames import Hello
from penstock.wire.proof import hello, is_proved

SECRET, OTHER = b"s" * 32, b"t" * 32


def test_who_knows_the_secret_proves_it_to_that_process() -> None:
    assert is_proved(hello(SECRET, "gateway-1", "epoch"), SECRET, "epoch")


@pytest.mark.parametrize(
    "said",
    [
        Hello("gateway-1"),
        hello(OTHER, "gateway-1", "epoch"),
        hello(SECRET, "gateway-1", "another epoch"),
        Hello("gateway-2", proof=hello(SECRET, "gateway-1", "epoch").proof),
        Hello("gateway-1 epoch", proof=hello(SECRET, "gateway-1", "epoch epoch").proof),
    ],
    ids=["no proof", "another secret", "another process", "another router", "parts moved"],
)
def test_nothing_else_is_a_proof(said: Hello) -> None:
    assert not is_proved(said, SECRET, "epoch")


def test_the_secret_does_not_travel() -> None:
    assert SECRET not in hello(SECRET, "gateway-1", "epoch").proof
