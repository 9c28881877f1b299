"""External text is shown in one line and truncated."""

import pickle
from pathlib import Path

import pytest
from requests import ConnectionError
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection
from urllib3.exceptions import MaxRetryError, NewConnectionError

from zoo.errors import DataError, connection_reason, escape, hide_secrets, nearest


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
def test_terminal_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_error_gives_place_cause_and_remedy_all_escaped() -> None:
    error = DataError("it is empty\x1b\nor short", Path("a\nb"), "remove it")
    assert str(error) == "a\\nb: it is empty\\x1b\nor short; remove it"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(DataError("it is empty", remedy="remove it")) == "it is empty; remove it"
    assert str(DataError("it is empty", "a")) == "a: it is empty"
    assert str(DataError("it is empty")) == "it is empty"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet19", "the nearest names are resnet18 (zoo list shows all)"),
        ("RESNET18", "the nearest names are resnet18 (zoo list shows all)"),
        ("nosuch", "zoo list shows all"),
    ],
)
def test_only_similar_names_are_suggested(name: str, hint: str) -> None:
    assert nearest(name, ["resnet18", "densenet264", "vovnet"], "zoo list shows all") == hint


def test_reason_of_failed_request_is_innermost() -> None:
    refused = NewConnectionError(HTTPConnection("a.invalid", 80), "Connection refused")
    exhausted = MaxRetryError(HTTPConnectionPool("a.invalid", 80), "/x" * 200, refused)
    assert connection_reason(ConnectionError(exhausted)) == "a.invalid: Connection refused"
    assert connection_reason(OSError(5, "Input/output error")) == "[Errno 5] Input/output error"
    assert connection_reason(TimeoutError()) == "TimeoutError"
    assert connection_reason(ValueError("https://me:secret@host/x is\ngone")) == "https://host/x is gone"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:SECRET@host/a", "https://host/a"),
        ("https://host/a?sig=SECRET/x%3D&se=SECRET", "https://host/a?sig=***&se=***"),
        ("with url: /a?X-Amz-Signature=SECRET (Caused by", "with url: /a?X-Amz-Signature=*** (Caused by"),
        ("zoo train a.json 'https://host/a?SECRET' -j 2", "zoo train a.json 'https://host/a?***' -j 2"),
        ("https://drive.google.com/uc?id=123", "https://drive.google.com/uc?id=123"),
        ("is it so? no: a & b=c", "is it so? no: a & b=c"),
    ],
)
def test_secrets_of_addresses_are_hidden(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
