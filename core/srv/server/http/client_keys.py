"""The file of `--api-keys-file`: a key per line, with a name and limits.

    # a comment
    KEY
    KEY name=team-a requests_per_minute=600 concurrent_requests=16

Must not know HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection
from srv.server.http.keys import BLANKS, key_lines

if TYPE_CHECKING:
    from srv.args.statement import Resolved

_WORD = re.compile(f"[^{BLANKS}]+")
_LIMITS = ("requests_per_minute", "concurrent_requests")


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One client. None: no limit."""

    key: str = field(repr=False)
    name: str
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None


def client_keys(resolved: Resolved) -> tuple[ClientKey, ...]:
    """The keys of the file; () without one. Raises Refusal for a line that is not valid, and names it, not its key."""
    path = resolved.config.server.api_keys_file
    if path is None:
        return ()
    try:
        keys = _read(path.expanduser())
    except ValueError as error:
        owner = resolved.provenance["api_keys_file"].owner
        remedy = (
            "Write one key per line: KEY name=NAME requests_per_minute=N concurrent_requests=N (all but KEY optional)."
        )
        raise Refusal([Rejection("bad_keys", "api_keys_file", str(path), owner, str(error), remedy)]) from None
    return keys


def _read(path: Path) -> tuple[ClientKey, ...]:
    """Raises ValueError with a clause about the file."""
    if not path.is_file():
        raise ValueError("there is no such file")
    try:
        lines = key_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({error})") from None
    clients: dict[str, ClientKey] = {}
    for number, line in enumerate(lines, 1):
        words = _WORD.findall(line)
        if not words or words[0].startswith("#"):
            continue
        one = _client(words, number)
        if one.key in clients or any(one.name == other.name for other in clients.values()):
            raise ValueError(f"line {number} repeats the key or the name of another one")
        clients[one.key] = one
    if not clients:
        raise ValueError("it has no key")
    return tuple(clients.values())


def _client(words: list[str], number: int) -> ClientKey:
    name, limits = f"line {number}", dict.fromkeys(_LIMITS, 0)
    for word in words[1:]:
        option, _, value = word.partition("=")
        if option == "name" and value:
            name = value
        elif option in _LIMITS and value.isascii() and value.isdigit() and 0 < int(value) < 10**9:
            limits[option] = int(value)
        else:
            raise ValueError(
                f"line {number} has {word!r}, which is none of name=NAME, "
                + ", ".join(f"{limit}=N" for limit in _LIMITS)
            )
    return ClientKey(words[0], name, *(limits[limit] or None for limit in _LIMITS))
