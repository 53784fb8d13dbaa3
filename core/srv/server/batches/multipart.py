"""Reads a form with files (multipart/form-data, RFC 7578) from a body that is in memory.

Must not know which fields a form has.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value

from srv.errors import RequestError

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
MAX_BOUNDARY = 70  # RFC 2046


@dataclass(frozen=True, slots=True)
class Part:
    """One field. `filename`: as the client calls the file, None if it is none."""

    data: bytes
    filename: str | None


def read_form(body: bytes, content_type: str) -> dict[str, Part]:
    """The fields by name. Raises RequestError."""
    delimiter = b"\r\n--" + _boundary(content_type)
    _, *parts = (b"\r\n" + body).split(delimiter, MAX_PARTS + 1)
    fields: dict[str, Part] = {}
    for part in parts:
        if part.startswith(b"--"):
            return fields
        if len(fields) == MAX_PARTS:
            break
        name, field = _part(part)
        if name in fields:
            raise _invalid(f"the field {name[:80]} occurs twice")
        fields[name] = field
    raise _invalid(f"it does not end, or has more than {MAX_PARTS} fields" if parts else "it has no fields")


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary() if message.get_content_type() == "multipart/form-data" else None
    if not boundary or len(boundary) > MAX_BOUNDARY:
        raise _invalid("Content-Type must be multipart/form-data, with a boundary")
    return boundary.encode("latin-1", "replace")


def _part(part: bytes) -> tuple[str, Part]:
    end = part.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
    if end < 0 or not part.startswith(b"\r\n"):
        raise _invalid("a field has no header, or a very long one")
    header = HeaderParser().parsestr(part[2:end].decode("utf-8", "replace"))
    name = header.get_param("name", header="content-disposition")
    if not name:
        raise _invalid("a field has no name")
    return collapse_rfc2231_value(name), Part(part[end + 4 :], header.get_filename())


def _invalid(problem: str) -> RequestError:
    return RequestError(
        f"the form cannot be read: {problem}; send multipart/form-data, as curl -F does", code="invalid_form"
    )
