"""Who may call which path: keys, and for a server on a loopback address the names by which browsers may call it.

A browser sends the requests of any web page to 127.0.0.1, and a page can give its own host name that address (DNS
rebinding). Such requests carry the page's `Origin`, or its host name as `Host`. Must not know what an endpoint does.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from srv.errors import RequestError
from srv.server.client_keys import ClientKey
from srv.server.keys import is_loopback

OPEN_PATHS = frozenset({"/health", "/metrics", "/ping"})  # orchestrators probe them without a key
_PROFILE = frozenset({"/start_profile", "/stop_profile"})
_EXPERTS = frozenset(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
_OPERATION = frozenset({"/server_info", "/pause_generation", "/continue_generation", "/set_log_level"})
PAGE_PATHS = frozenset({"/", "/ui/app.js", "/ui/style.css"})  # a browser cannot send a key with them
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request", "/get_server_info"}) | _OPERATION | _PROFILE | _EXPERTS
_READING = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
ANY = "*"


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server.

    key: needed for all paths but `OPEN_PATHS`, or the key of one of the clients. admin_key: needed for `ADMIN_PATHS`
    instead, and accepted everywhere. loopback: whether the server listens on a loopback address only. hosts, origins:
    names that may call besides this machine's own; a `*` accepts any. Hosts are checked on a loopback address, or if
    there are some.
    """

    key: str | None = None
    admin_key: str | None = None
    clients: tuple[ClientKey, ...] = ()
    loopback: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def refusal(self, scope: Scope) -> RequestError | None:
        """Why this request is refused: status 401 or 403; None if it is accepted."""
        headers = Headers(scope=scope)
        if scope["method"] not in _READING and (refused := self._foreign(headers)) is not None:
            return refused
        if self._has_key(scope["path"], headers):
            return None
        admin = self.admin_key is not None and scope["path"] in ADMIN_PATHS
        which = "the key of --admin-api-key" if admin else "the API key"
        return RequestError(
            f"{which} is missing or wrong; send Authorization: Bearer KEY, or X-Api-Key: KEY",
            code="invalid_api_key",
            status=401,
        )

    def _has_key(self, path: str, headers: Headers) -> bool:
        if path in OPEN_PATHS or path in PAGE_PATHS:
            return True
        admin = self.admin_key is not None and path in ADMIN_PATHS
        accepted = [] if admin else [self.key, *(each.key for each in self.clients)]
        if not admin and accepted == [None]:
            return True
        sent = [key.encode("latin-1") for key in sent_keys(headers)]  # as header values are on the wire
        keys = [key.encode() for key in (*accepted, self.admin_key) if key is not None]
        matches = [hmac.compare_digest(given, key) for given in sent for key in keys]  # in constant time
        return any(matches)

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of this origin may call: those of `origins`, and, if there are some or the server listens on a
        loopback address, those of this machine."""
        try:
            name = urlsplit(origin).hostname if "://" in origin else None
        except ValueError:  # of "http://[", for example
            name = None
        local = bool(self.loopback or self.origins) and name is not None and is_loopback(name)
        return ANY in self.origins or origin in self.origins or local

    def _foreign(self, headers: Headers) -> RequestError | None:
        if self.loopback or self.hosts:
            host = _host_name(headers.get("host", ""))
            if host and not _allowed(host, self.hosts):
                return RequestError(
                    f"Host {host[:80]} is refused: it is not a name of this server; add it with --allowed-hosts",
                    code="host_not_allowed",
                    status=403,
                )
        origin = headers.get("origin")
        if (self.loopback or self.origins) and origin is not None and not self.allows_origin(origin):
            return origin_refused(origin)
        return None


OPEN = Access()


def sent_keys(headers: Headers) -> list[str]:
    """The keys in a request's headers: Authorization: Bearer KEY, X-Api-Key: KEY."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    keys = [given.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
    return [key for key in keys if key]


def origin_refused(origin: str) -> RequestError:
    return RequestError(
        f"Origin {origin[:80]} is refused: web pages of other hosts may not call this server;"
        " add it with --allowed-origins",
        code="origin_not_allowed",
        status=403,
    )


def _allowed(host: str, hosts: tuple[str, ...]) -> bool:
    return is_loopback(host) or ANY in hosts or host in map(str.lower, hosts)


def _host_name(header: str) -> str:
    """The name or address of a `Host` header, without its port and the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()
