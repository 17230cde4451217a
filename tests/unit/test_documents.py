import pytest

from tests.documents import CommandHidden, Step, matches, steps, table_commands


def test_a_terminal_is_commands_with_their_output_and_interrupts() -> None:
    text = "Words\n```console\n$ one \\\n> more\nout\n\nput\n$ two\n^C\nbye\n```\n```mermaid\n$ none\n```\n"

    assert steps(text) == [Step("one \\\nmore", "out\n\nput\n", 3), Step("two", "", 8), Step("^C", "bye\n", 9)]


@pytest.mark.parametrize("kind", ["", "sh", "bash"])
def test_a_block_in_which_commands_would_hide_is_refused(kind: str) -> None:
    with pytest.raises(CommandHidden, match="line 2"):
        steps(f"Words\n```{kind}\nmake up\n```\n")


def test_a_table_has_commands_in_their_column_only() -> None:
    text = (
        "| feature | one command | where |\n|---|---|---|\n| `a` | `b \\| c` | `d` |\n| **group** | | |\n\n| x | y "
        "|\n|---|---|\n| e | `f` |\n"
    )

    assert table_commands(text) == [Step("b | c", None, 3)]


@pytest.mark.parametrize(
    ("expected", "actual", "is_match"),
    [
        ("took 1.5 s", "took 12.25 s", True),
        ("3 tokens", "4 tokens", False),
        ("a ... d", "a b\nc d", True),
        ("a ... d", "a b c", False),
        ("a sentence....", "a sentence. And more.", True),
        ("header: 1", "header: 1\r\n", True),
        ("replica: abcd1234", "replica: zzzz9999", True),
        ("id-0123456789abcdef01234567", "id-fedcba9876543210fedcba98", True),
        ("key sk-penstock-aa", "key sk-penstock-bb", True),
        ("127.0.0.1", "127.0.0.2", False),
        ('penstock_replicas{pool="a"} 2.0', 'penstock_replicas{pool="a"} 1.0', False),
        ("trailing \nblank", "trailing\nblank\n", True),
        ("nothing", "", False),
    ],
)
def test_output_matches_but_for_what_differs_from_run_to_run(expected: str, actual: str, is_match: bool) -> None:
    assert matches(expected, actual) is is_match
