"""Errors that a user can correct, the exit codes of the commands, and functions that make text safe to show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_USER_ERROR = 2
EXIT_VERIFICATION_FAILED = 3
EXIT_NOT_FINITE = 4
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL in sysexits.h: the state was saved; continue with --resume auto
EXIT_KEYBOARD_INTERRUPT = 130  # 128 + SIGINT, as shells report it: nothing was saved
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the program that read the output has ended

MAX_LISTED = 10
MAX_SHOWN_CHARS = 200
MAX_SHOWN_REPR, MAX_SHOWN_LIST = 100, 500  # characters


class ZooError(Exception):
    """An error that the user can correct. Command lines print it without a traceback.

    Its text is "where: what; remedy". Control characters are escaped (`escape`), except for line breaks in ``what``.

    Args:
    - `what`: what is wrong, with the values.
    - `where`: the file, key or layer with the fault. Omitted if empty.
    - `remedy`: what the user can do about it. Omitted if empty.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, what: object, where: object = "", remedy: object = "") -> None:
        text = "\n".join(map(escape, str(what).split("\n")))
        super().__init__("; ".join(filter(None, [": ".join(filter(None, [escape(where), text])), escape(remedy)])))


class ConfigError(ZooError, ValueError):
    """An experiment file, an option or an argument is wrong."""


class WeightsError(ZooError):
    """A weights file is missing, damaged, unsafe or does not fit the network."""


class ConversionError(ZooError):
    """A conversion of weights is impossible or would not be exact."""


class DataError(ZooError):
    """A data folder or an image cannot be used."""


class CheckpointError(ZooError):
    """A training checkpoint cannot be written, read or resumed from."""


class VerificationError(ZooError):
    """A check of our own results failed (exit code 3)."""

    exit_code = EXIT_VERIFICATION_FAILED


class NonFiniteLossError(ZooError):
    """The training loss is not finite (exit code 4)."""

    exit_code = EXIT_NOT_FINITE


class TrainingInterrupted(ZooError):
    """Training was stopped by a signal after its state was saved (exit code 75)."""

    exit_code = EXIT_INTERRUPTED


def nearest(name: str, known: Iterable[str], listing: str) -> str:
    """Return a remedy for an unknown name: up to three similar entries of ``known``, and ``listing``.

    The most similar entry comes first; ignores case. ``listing`` says where to find all names; it is returned alone if
    no entry is similar.
    """
    names = {each.lower(): each for each in known}
    near = [names[each] for each in difflib.get_close_matches(name.lower(), names)]
    return f"the nearest names are {join_names(near)} ({listing})" if near else listing


def escape(text: object) -> str:
    """Return ``text`` as one line that is safe to show in a terminal and to write into a log.

    File names, keys of weights files and answers of servers come from outside. Control characters, line breaks and
    bytes that are not UTF-8 become backslash escapes, so that none of them can color a terminal or forge a log line.
    """
    full = str(text)
    if full.isprintable():  # fast path: nearly all names are, and a data set has one per image
        return full
    escaped = (
        char if char.isprintable() else char.encode("unicode_escape", errors="surrogatepass").decode("ascii")
        for char in full
    )
    return "".join(escaped)


def shorten_repr(value: object) -> str:
    """Return the repr of any value from a file as one short line."""
    if isinstance(value, list):
        more = f" and {len(value) - MAX_LISTED:,} more" if len(value) > MAX_LISTED else ""
        return f"[{', '.join(map(shorten_repr, value[:MAX_LISTED]))}{more}]"[:MAX_SHOWN_LIST]
    try:
        text = repr(value[:MAX_SHOWN_REPR] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # numbers of thousands of digits; endlessly nested dicts
        text = f"(too long to show: {type(value).__name__})"
    return escape(text[:MAX_SHOWN_REPR])


def hide_secrets(text: str) -> str:
    """Remove secrets from the URLs in ``text``: user names, passwords and query values.

    A signed URL has its signature in the query. The value of ``id`` stays: it names a file on Google Drive.
    """
    without_password = re.sub(r"(?<=://)[^/?#\s]*@", "", text)
    return re.sub(r"(?<=[?&])(?!id=)([^=&\s]+=)?[^&\s'\")]+", r"\1***", without_password)


def connection_reason(error: BaseException) -> str:
    """Return the name of the server and the innermost reason of a failed request, in one line and without passwords.

    The errors of requests and urllib3 quote one another, so the reason is at the end of a long text.
    """
    while isinstance(inner := getattr(error, "reason", None) or next(iter(error.args), None), BaseException):
        error = inner
    text = re.sub(r"^<?HTTPS?Connection\w*\(host='([^']*)'.*?\)>?: ", r"\1: ", " ".join(str(error).split()))
    return truncate(hide_secrets(text) or type(error).__name__)


def truncate(text: object) -> str:
    """Return the first `MAX_SHOWN_CHARS` characters of ``text``, escaped, and "..." if there are more."""
    full = str(text)
    return escape(full[:MAX_SHOWN_CHARS]) + ("..." if len(full) > MAX_SHOWN_CHARS else "")


def join_names(names: Iterable[object], count: int = MAX_LISTED) -> str:
    """Return the first ``count`` names, truncated and separated by commas, and the number of further names."""
    names = list(names)
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(map(truncate, names[:count])) + more
