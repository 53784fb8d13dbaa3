"""The keys of a server, and whether it needs one: what `srv launch` checks before anything slow is started.

Must not know HTTP.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.args.statement import Resolved


# All that surrounds a key in a header (RFC 9110, OWS) or a file. `str.strip` without it also removes bytes 85 and A0,
# with which UTF-8 of many letters ends.
BLANKS = " \t"


def key_lines(path: Path) -> list[str]:
    """The lines of a file of keys. Only line breaks end them: `str.splitlines` knows more characters, which a key may
    have. Raises OSError and UnicodeDecodeError."""
    return path.read_text(encoding="utf-8-sig").split("\n")


def is_address(host: str) -> bool:
    """Whether this is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def api_key(resolved: Resolved) -> str | None:
    """The key that clients must send: that of --api-key, or the first line of the file of --api-key-file.

    Raises Refusal if the file cannot be read or has no key. To be called once: the file may be a pipe.
    """
    server = resolved.config.server
    if server.api_key_file is None:
        return server.api_key
    reason = "its first line is empty"
    try:
        lines = key_lines(server.api_key_file.expanduser())
    except (OSError, UnicodeDecodeError) as error:
        reason, lines = f"it cannot be read ({error})", []
    if lines and (key := lines[0].strip(BLANKS)):
        return key
    owner = resolved.provenance["api_key_file"].owner
    remedy = "Give a text file whose first line is the key."
    raise Refusal([Rejection("no_key", "api_key_file", str(server.api_key_file), owner, reason, remedy)])


def public_without_key(host: str, key: str | None) -> str | None:
    """A warning for the operator of a server that other machines can use without a key; None for any other server."""
    if key is not None or is_loopback(host):
        return None
    return (
        f"host = {host} lets everyone who reaches this address use the server, because no key is set;"
        " set --api-key-file, or listen on 127.0.0.1"
    )
