"""A hub on this machine: the endpoints of the Hugging Face hub that srv uses, over files of a folder.

It counts the bytes of file contents that it sends, by file, so that a test knows what was downloaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub(ThreadingHTTPServer):
    """Serves `root/org/name` as the repository org/name. `ranges`: whether it honours range requests."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.sent, self.ranges = root, Counter[str](), True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/revision/[\w.-]+)?", path):
            self._list(match[1])
        elif match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/tree/[\w.-]+.*", path):
            self._tree(match[1])
        elif match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[\w.-]+/(.+)", path):
            self._send_file(match[1], match[2], with_body=with_body)
        else:
            self._missing("EntryNotFound")

    def _files(self, repo: str) -> list[Path]:
        folder = self.server.root / repo
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def _list(self, repo: str) -> None:
        files = self._files(repo)
        if not files:
            self._missing("RepoNotFound")
            return
        siblings = [
            {"rfilename": str(path.relative_to(self.server.root / repo)), "size": path.stat().st_size} for path in files
        ]
        self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})

    def _tree(self, repo: str) -> None:
        folder = self.server.root / repo
        entries = [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": _etag(path)}
            for path in self._files(repo)
        ]
        self._json(entries)

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_file(self, repo: str, name: str, *, with_body: bool) -> None:
        path = self.server.root / repo / name
        if not path.is_file():
            self._missing("EntryNotFound")
            return
        begin, end = 0, path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        partial = asked is not None and self.server.ranges
        if asked is not None and partial:
            begin, end = int(asked[1]), min(int(asked[2]) + 1, end)
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.end_headers()
        if with_body:
            self._send(path, begin, end, f"{repo}/{name}")

    def _send(self, path: Path, begin: int, end: int, name: str) -> None:
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end:
                content = file.read(min(1 << 16, end - begin))
                try:
                    self.wfile.write(content)
                except OSError:  # the client has closed the connection
                    self.close_connection = True
                    return
                self.server.sent[name] += len(content)
                begin += len(content)


def _etag(path: Path) -> str:
    return hashlib.sha1(f"{path.name} {path.stat().st_size}".encode()).hexdigest()


@contextmanager
def running_hub(root: Path) -> Iterator[LocalHub]:
    """A hub that runs until the context ends."""
    hub = LocalHub(root)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
