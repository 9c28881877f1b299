"""Google Drive's page that asks for confirmation before a large file: what its form would send."""

from __future__ import annotations

from html.parser import HTMLParser
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

DRIVE_URL = "https://drive.google.com/uc"


def drive_url(drive_id: str) -> str:
    """Return the address that answers with the file, or with a page that asks for confirmation."""
    return f"{DRIVE_URL}?{urlencode({'export': 'download', 'id': drive_id})}"


class Page(HTMLParser):
    """The title of a web page, and the address that its download form leads to.

    ``link`` is None where the page has no such form: one with "download" in its id or a field named "confirm".
    ``base`` is the address of the page, to which that of the form may be relative.
    """

    def __init__(self, html: str, base: str) -> None:
        super().__init__()
        self.title = ""
        self.link: str | None = None
        self._base = base
        self._in_title = False
        self._form: dict[str, str] | None = None
        self._fields: dict[str, str] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the beginning of the title or of a form, and the hidden fields of a form."""
        attributes = {key: value or "" for key, value in attrs}
        if tag == "title":
            self._in_title = True
        elif tag == "form":
            self._form, self._fields = attributes, {}
        elif tag == "input" and attributes.get("type", "").lower() == "hidden" and "name" in attributes:
            self._fields[attributes["name"]] = attributes.get("value", "")

    def handle_endtag(self, tag: str) -> None:
        """Note the end of the title or of a form."""
        if tag == "title":
            self._in_title = False
        elif tag == "form" and self._form is not None:
            if self.link is None and ("download" in self._form.get("id", "").lower() or "confirm" in self._fields):
                self.link = self._submitted(self._form.get("action", ""))
            self._form = None

    def handle_data(self, data: str) -> None:
        """Collect the title."""
        if self._in_title:
            self.title = " ".join(f"{self.title} {data}".split())

    def _submitted(self, action: str) -> str | None:
        parts = urlsplit(urljoin(self._base, action))
        if parts.scheme not in ("http", "https"):
            return None
        query = dict(parse_qsl(parts.query, keep_blank_values=True)) | self._fields
        return urlunsplit(parts._replace(query=urlencode(query), fragment=""))
