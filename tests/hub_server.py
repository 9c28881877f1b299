"""A local server in place of the Hugging Face Hub, which answers requests for models: download, create, and commit."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.local_server import LocalServer

TOKEN = "secret"


class Hub(LocalServer):
    """Repositories by name, each with its files by commit; "main" is the last one. Records the requests.

    Requests to ``private`` repositories, and all that write without the token `TOKEN`, are refused.
    """

    def __init__(self) -> None:
        super().__init__(Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Add files to a repository, and return the commit."""
        commits = self.repositories.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[commit] = commits["main"] = {**commits.get("main", {}), **files}
        return commit


@pytest.fixture(scope="module")
def _package_and_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A server, and the package huggingface_hub imported with its address, which it reads when it is imported."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("safetensors")
    imported = _remove_package()
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("NO_PROXY", "*")
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub
        sys.modules["huggingface_hub"].close_session()
    _remove_package()
    sys.modules.update(imported)


def _remove_package() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def hub(_package_and_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty Hub, an empty cache, and a token that may write."""
    from huggingface_hub import constants

    _package_and_hub.repositories.clear()
    _package_and_hub.private.clear()
    _package_and_hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    return _package_and_hub


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._send_file(with_content=False)

    def do_GET(self) -> None:
        self._send_file(with_content=True)

    def do_POST(self) -> None:
        self._record()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(
                401, {"error": "Invalid username or password."}, X_Error_Message="Invalid username or password."
            )
            return
        match unquote(self.path).strip("/").split("/"):
            case ["api", "repos", "create"]:
                wanted = json.loads(content)
                name = f"{wanted['organization']}/{wanted['name']}"
                is_new = name not in self.server.repositories
                self.server.repositories.setdefault(name, {"main": {}})
                answer = {"url": f"{self.server.url}/{name}", "error": "You already created this model repo"}
                self._answer(200 if is_new else 409, answer)
            case ["api", "models", owner, name, "preupload", _]:
                files = [
                    {**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(content)["files"]
                ]
                self._answer(200, {"files": files, "repo": f"{owner}/{name}"})
            case ["api", "models", owner, name, "commit", _]:
                lines = [json.loads(line) for line in content.splitlines()]
                files = {
                    line["value"]["path"]: base64.b64decode(line["value"]["content"])
                    for line in lines
                    if line["key"] == "file"
                }
                commit = self.server.commit(f"{owner}/{name}", files)
                url = f"{self.server.url}/{owner}/{name}/commit/{commit}"
                self._answer(200, {"commitUrl": url, "commitOid": commit, "success": True})
            case ["api", "validate-yaml"]:
                self._answer(200, {"errors": [], "warnings": []})
            case _:
                self._answer(404, {"error": f"unknown request {self.path}"})

    def _record(self) -> None:
        if "/api/agent" not in self.path:  # a list of programs that the package requests once
            self.server.requests.append(f"{self.command} {unquote(self.path)}")

    def _send_file(self, *, with_content: bool) -> None:
        self._record()
        path = unquote(self.path.partition("?")[0]).strip("/")
        name, _, rest = path.removeprefix("api/models/").partition("/resolve/")
        commits = self.server.repositories.get(name, {})
        if not commits:
            self._answer(401, {}, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif name in self.server.private:
            self._answer(403, {}, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
        else:
            revision, _, file = rest.partition("/")
            files = commits.get(revision)
            if files is None:
                self._answer(404, {}, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            elif file not in files:
                self._answer(404, {}, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            else:
                commit = next(each for each in commits if each != "main" and commits[each] is files)
                etag = hashlib.sha256(files[file]).hexdigest()
                self._send(200, files[file], with_content, ETag=f'"{etag}"', X_Repo_Commit=commit)

    def _answer(self, status: int, content: dict[str, Any], **headers: str) -> None:
        self._send(status, json.dumps(content).encode(), self.command != "HEAD", **headers)

    def _send(self, status: int, content: bytes, with_content: bool, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)
