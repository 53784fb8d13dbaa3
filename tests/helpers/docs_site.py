"""Build the docs site for tests as `make docs` does, and serve it on the loopback address."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BUILD_TIMEOUT_S = 240  # a few seconds on an idle machine


def build_docs(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the Markdown of `source` with the configuration of docs/. Any warning makes the exit status nonzero."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    command += ["--conf-dir", str(DOCS), "--doctree-dir", str(out.with_name(out.name + "-doctrees"))]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [*command, str(source), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=False,
    )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests of tests."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve these files while the block runs; yields the address."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="docs site")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join(timeout=30)
