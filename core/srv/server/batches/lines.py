"""Reads the file of a batch: one JSON object per line. Must not know how a request is served.

{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from srv.errors import RequestError
from srv.server.http.body import BodyLimits, parse

MAX_LINES = 50_000  # OpenAI's limit
MAX_LINE_BYTES = 8 * 2**20
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. `body` is a JSON object."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch fails. `line` counts from 1; None: the file, or the batch, as a whole."""

    message: str
    line: int | None = None
    code: str = "invalid_batch_file"

    def shown(self) -> dict[str, object]:
        """An entry of `errors` of OpenAI's batch object."""
        return {"code": self.code, "message": self.message, "param": None, "line": self.line}


@dataclass(slots=True)
class ReadLines:
    """The offsets of the lines, or what is wrong with them."""

    offsets: list[int] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)


def check_lines(path: Path, endpoint: str, limits: BodyLimits) -> ReadLines:
    """Check every line of a file before any is served. Call it in a thread. Raises OSError."""
    read, names = ReadLines(), set[str]()
    with path.open("rb") as file:
        offset = number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                read.errors.append(LineError(f"the line has more than {MAX_LINE_BYTES} bytes", number))
                break
            if data.strip():
                problem = _problem(data, endpoint, limits, names)
                if problem:
                    read.errors.append(LineError(problem, number))
                read.offsets.append(offset)
            offset += len(data)
            if len(read.errors) == MAX_ERRORS:
                break
            if len(read.offsets) > MAX_LINES:
                read.errors.append(LineError(f"the file has more than {MAX_LINES} lines"))
                break
    if not read.offsets and not read.errors:
        read.errors.append(LineError("the file is empty"))
    return read


def read_line(path: Path, offset: int) -> BatchLine:
    """A line that was checked. Call it in a thread. Raises OSError, or MsgspecError if the file has changed."""
    with path.open("rb") as file:
        file.seek(offset)
        return msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=BatchLine)


def _problem(data: bytes, endpoint: str, limits: BodyLimits, names: set[str]) -> str | None:
    """What is wrong with a line; adds its id to `names`."""
    try:
        line = msgspec.json.decode(data, type=BatchLine)
        body = parse(bytes(line.body), limits)
    except (RequestError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"the line is not a request: {error}"
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        return f"custom_id must have 1 to {MAX_CUSTOM_ID} characters"
    if line.custom_id in names:
        return f"custom_id {line.custom_id[:80]!r} occurs twice"
    names.add(line.custom_id)
    if line.method != "POST":
        return f"method must be POST, not {line.method[:80]!r}"
    if line.url != endpoint:
        return f"url must be {endpoint}, the endpoint of the batch, not {line.url[:80]!r}"
    if not isinstance(body, dict):
        return "body must be a JSON object"
    return "body.stream is refused: the output of a batch is a file" if body.get("stream") else None
