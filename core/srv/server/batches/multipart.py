"""Reads a form with files (multipart/form-data, RFC 7578) from a body that is in memory.

Must not know which fields a form has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from typing import TypeVar

from srv.errors import RequestError

MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
MAX_BOUNDARY = 70  # RFC 2046
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field. `filename`: as the client calls the file, None if it is none."""

    data: bytes
    filename: str | None


def read_form(body: bytes, content_type: str) -> dict[str, FormPart]:
    """The fields by name. Raises RequestError."""
    delimiter = b"\r\n--" + _boundary(content_type)
    _, *parts = (b"\r\n" + body).split(delimiter, MAX_PARTS + 1)
    fields: dict[str, FormPart] = {}
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
    kind, boundary = _parse(lambda: (message.get_content_type(), message.get_boundary()), "its Content-Type")
    if kind != "multipart/form-data" or not boundary or len(boundary) > MAX_BOUNDARY:
        raise _invalid("Content-Type must be multipart/form-data, with a boundary")
    return boundary.encode("latin-1", "replace")


def _part(part: bytes) -> tuple[str, FormPart]:
    end = part.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)
    if end < 0 or not part.startswith(b"\r\n"):
        raise _invalid("a field has no header, or a very long one")
    header = HeaderParser().parsestr(part[2:end].decode("utf-8", "replace"))
    name, filename = _parse(lambda: (_name(header), header.get_filename()), "the header of a field")
    if not name:
        raise _invalid("a field has no name")
    return _without_surrogates(name), FormPart(
        part[end + 4 :], None if filename is None else _without_surrogates(filename)
    )


def _name(header: Message) -> str:
    name = header.get_param("name", "", header="content-disposition")
    return collapse_rfc2231_value(name)


def _parse(parse: Callable[[], T], what: str) -> T:
    """The result of the standard library's parser, which is not made for hostile input. Raises RequestError."""
    try:
        return parse()
    except (ValueError, TypeError, LookupError, AttributeError):  # a codec for no text, a part without number, NUL, ...
        raise _invalid(f"{what} is not valid") from None


def _without_surrogates(text: str) -> str:
    """The text with "?" for lone surrogates, which some codecs return and JSON cannot represent."""
    return text.encode("utf-8", "replace").decode()


def _invalid(problem: str) -> RequestError:
    return RequestError(
        f"the form cannot be read: {problem}; send multipart/form-data, as curl -F does", code="invalid_form"
    )
