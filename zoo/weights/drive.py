"""Google Drive's page that asks for confirmation before a large file: what its form would send."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

DRIVE_URL = "https://drive.google.com/uc"

# A page comes from anywhere: these take time in proportion to its length, whatever it holds, and never fail.
TITLE = re.compile(r"<title\b[^<>]*>([^<]*)", re.IGNORECASE)
TAG = re.compile(r"<(/?form|input)\b([^<>]*)>", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""(?<![\w-])([\w-]+)=(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


def drive_url(drive_id: str) -> str:
    """Return the address that answers with the file, or with a page that asks for confirmation."""
    return f"{DRIVE_URL}?{urlencode({'export': 'download', 'id': drive_id})}"


@dataclass(frozen=True)
class Page:
    """The title of a web page, and the address that its download form leads to.

    ``link`` is None where the page has no such form: one with "download" in its id or a field named "confirm".
    """

    title: str
    link: str | None


def read_form(html: str, base: str) -> Page:
    """Return title and link of a page; ``base`` is its address, to which that of the form may be relative.

    Raises ValueError where the form's address is none.
    """
    title = TITLE.search(html)
    return Page(" ".join(unescape(title[1]).split()) if title else "", _link(html, base))


def _link(html: str, base: str) -> str | None:
    form: dict[str, str] | None = None
    fields: dict[str, str] = {}
    for tag, text in TAG.findall(html):
        attributes = {key.lower(): unescape(a or b or c) for key, a, b, c in ATTRIBUTE.findall(text)}
        if tag.lower() == "form":
            form, fields = attributes, {}
        elif tag.lower() == "/form":
            if form is not None and ("download" in form.get("id", "").lower() or "confirm" in fields):
                return _submitted(form.get("action", ""), base, fields)
            form = None
        elif attributes.get("type", "").lower() == "hidden" and "name" in attributes:
            fields[attributes["name"]] = attributes.get("value", "")
    return None


def _submitted(action: str, base: str, fields: dict[str, str]) -> str | None:
    parts = urlsplit(urljoin(base, action))
    if parts.scheme not in ("http", "https"):
        return None
    query = dict(parse_qsl(parts.query, keep_blank_values=True)) | fields
    return urlunsplit(parts._replace(query=urlencode(query), fragment=""))
