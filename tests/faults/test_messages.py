"""What comes from outside is shown in one line and cut to a length that somebody reads."""

import pickle
from pathlib import Path

import pytest

from zoo.errors import DataError, escape, join_names, truncate


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b.jpg", "a b.jpg"),
        ("é日本.png", "é日本.png"),
        ("red\x1b[31m", "red\\x1b[31m"),
        ("one\nepoch 1 validation: top-1 99", "one\\nepoch 1 validation: top-1 99"),
        ("bad\udcff.png", "bad\\udcff.png"),
        ("right\u202eleft", "right\\u202eleft"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_long_list_is_cut_after_ten_and_counted() -> None:
    assert join_names(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert join_names(f"k{index}\n" for index in range(1012)).endswith("k8\\n, k9\\n and 1,002 more")


def test_a_long_name_is_cut_too() -> None:
    assert truncate("x" * 200) == "x" * 200
    assert truncate("x" * 10**7) == "x" * 200 + "..."
    assert len(join_names(["x" * 10**6] * 20)) < 2100


def test_an_error_says_what_is_wrong_where_and_what_to_do_and_escapes_all_of_it() -> None:
    error = DataError("it is empty\x1b\nor short", Path("a\nb"), "remove it")
    assert str(error) == "it is empty\\x1b\nor short; a\\nb: remove it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(DataError("it is empty", remedy="remove it")) == "it is empty; remove it"
    assert str(DataError("it is empty", "a")) == "it is empty; a"
    assert str(DataError("it is empty")) == "it is empty"
