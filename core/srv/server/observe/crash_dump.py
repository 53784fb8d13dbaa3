"""The requests of the last minutes, kept in memory so that a crash can be reproduced (`--crash-dump-folder`).

    requests ──► CrashRecorder ──► engine lost ──► crash-*.jsonl ──► srv replay ──► any server

A dump is a file of JSON lines: a header, then one line per request, with its body as it was sent. Keys and all other
headers are not recorded. Owns this format, and how much is kept. Must not know endpoints.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from srv import __version__
from srv.errors import SrvError

logger = logging.getLogger(__name__)

FORMAT = "srv-crash-dump"
KEPT_SECONDS = 300.0
KEPT_BYTES = 256 * 2**20  # of bodies; the oldest requests are dropped beyond that
_LATEST = 253_402_300_800.0  # the year 10000, in seconds since the epoch
_RECORDED_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(slots=True)
class RecordedRequest:
    """One request. `at`: seconds since the epoch. `status`: 0 until a response has ended; `complete`: it ended well.
    `encoding`: the content encoding of the body. `kept`: it has not been dropped."""

    at: float
    method: str
    path: str
    status: int = 0
    complete: bool = False
    encoding: str = ""
    body: bytearray = field(default_factory=bytearray)
    kept: bool = True

    def line(self) -> dict[str, object]:
        shown: dict[str, object] = {"at": round(self.at, 6), "method": self.method, "path": self.path}
        try:
            if self.body:
                shown["body"] = json.loads(self.body)
        except (ValueError, RecursionError):  # it is compressed, cut off, or no JSON
            shown |= {"base64": base64.b64encode(self.body).decode(), "content_encoding": self.encoding}
        return {**shown, "status": self.status, "complete": self.complete}


class CrashRecorder:
    """Keeps the requests of the last `seconds`."""

    def __init__(
        self,
        folder: Path,
        info: Mapping[str, object],
        seconds: float = KEPT_SECONDS,
        most_bytes: int = KEPT_BYTES,
    ) -> None:
        self._folder, self._info, self._seconds, self._most_bytes = folder, info, seconds, most_bytes
        self._requests: deque[RecordedRequest] = deque()
        self._held = 0  # bytes of their bodies

    def begin(self, method: str, path: str, encoding: str = "") -> RecordedRequest | None:
        """A request has arrived; None if it is none that changes or computes anything."""
        if method not in _RECORDED_METHODS:
            return None
        now = time.time()
        self._drop(now)
        recorded = RecordedRequest(now, method, path, encoding=encoding)
        self._requests.append(recorded)
        return recorded

    def add(self, recorded: RecordedRequest, part: bytes) -> None:
        """A part of a request's body has arrived."""
        if recorded.kept:
            recorded.body += part
            self._held += len(part)
            self._drop(time.time())

    def _drop(self, now: float) -> None:
        while self._requests and (self._requests[0].at < now - self._seconds or self._held > self._most_bytes):
            dropped = self._requests.popleft()
            dropped.kept = False
            self._held -= len(dropped.body)

    def dump(self, reason: str) -> Path | None:
        """Write what is kept to a new file, readable by this user only. None, and a log line, if that fails."""
        self._drop(time.time())
        name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        header = {
            "format": FORMAT,
            "version": 1,
            "srv": __version__,
            "reason": reason,
            "at": time.time(),
            **self._info,
        }
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                for line in (header, *(request.line() for request in self._requests)):
                    file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            logger.error("the last requests cannot be dumped to %s: %s", path, error)
            return None
        logger.error(
            "the last %d requests are in %s; `srv replay %s --url URL` sends them again",
            len(self._requests),
            path,
            path,
        )
        return path


class _Line(msgspec.Struct):
    """The fields of a request in a dump that `srv replay` uses, with what they may contain. The path is one of this
    server: never an address."""

    at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    method: Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{1,16}\Z")]
    path: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    status: int = 0
    complete: bool = False
    base64: str = ""
    content_encoding: Annotated[str, msgspec.Meta(pattern=r"\A[ -~]*\Z")] = ""


class DumpError(SrvError):
    """A file is no crash dump."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} cannot be replayed: {reason}. Pass a file that --crash-dump-folder has made. [no_crash_dump]"
        )


def read_dump(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header, and the requests in the order in which they arrived. Raises DumpError."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise DumpError(path, str(error)) from error
    except RecursionError:
        raise DumpError(path, "a line is nested too deeply") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise DumpError(path, "its first line is not the header of a dump")
    for number, line in enumerate(lines[1:], 2):
        try:
            read = msgspec.convert(line, _Line)
            base64.b64decode(read.base64)
            read.path.encode()
        except ValueError as error:  # of msgspec, too; or a lone surrogate
            raise DumpError(path, f"line {number} is no request: {error}") from None
    return lines[0], sorted(lines[1:], key=lambda line: float(line["at"]))
