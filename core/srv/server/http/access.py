"""Who may call which path: keys, and for a server on a loopback address the names by which browsers may call it.

A browser sends the requests of any web page to 127.0.0.1, and a page can give its own host name that address (DNS
rebinding). Such requests carry the page's `Origin`, or its host name as `Host`. Must not know what an endpoint does.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from srv.errors import RequestError
from srv.server.http.client_keys import ClientKey
from srv.server.http.keys import BLANKS, is_address, is_loopback

OPEN_PATHS = frozenset({"/health", "/metrics", "/ping"})  # orchestrators probe them without a key
_PROFILE = frozenset({"/start_profile", "/stop_profile"})
_EXPERTS = frozenset(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
_OPERATION = frozenset({"/server_info", "/pause_generation", "/continue_generation", "/set_log_level"})
# What one client would do to all others, or see of them and of the machine.
SHARED_PATHS = (
    frozenset({"/flush_cache", "/pause_generation", "/continue_generation", "/set_log_level"})
    | frozenset({"/server_info", "/get_server_info"})
    | _PROFILE
    | _EXPERTS
)
PAGE_PATHS = frozenset({"/", "/ui/app.js", "/ui/style.css"})  # a browser cannot send a key with them
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request", "/get_server_info"}) | _OPERATION | _PROFILE | _EXPERTS
ANY = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `owner`: a digest of its key, for what belongs to one client; "" without a key. `client`: the
    line of `--api-keys-file` that has this key, with its limits. `cache`: begins its namespaces of the prefix cache.
    `queue`: with whose requests those of this one share; None: with those of its owner. `stranger`: without a valid key
    on a server that needs one, at a path that does not.
    """

    owner: str = ""
    client: ClientKey | None = None
    cache: str = ""
    queue: str | None = None
    stranger: bool = False

    @property
    def share(self) -> str:
        """The owner for fair shares (`RequestSpec.owner`)."""
        return self.owner if self.queue is None else self.queue


NOBODY = Caller()
STRANGER = Caller(stranger=True)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server.

    key: needed for all paths but `OPEN_PATHS`, or the key of one of the clients. admin_key: needed for `ADMIN_PATHS`
    instead, and accepted everywhere. share_cache: clients with keys of their own share the prefix cache; otherwise one
    could find out by `cached_tokens` what another has sent. loopback: whether the server listens on a loopback address
    only. hosts, origins: names that may call besides this machine's own; a `*` accepts any. Hosts are checked on a
    loopback address, or if there are some.
    """

    key: str | None = None
    admin_key: str | None = None
    clients: tuple[ClientKey, ...] = ()
    share_cache: bool = False
    loopback: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def admit(self, scope: Scope) -> Caller | RequestError:
        """Who sends this request, or why it is refused: status 401 or 403."""
        headers, path = Headers(scope=scope), scope["path"]
        if (refused := self._foreign(path, headers)) is not None:
            return refused
        sent = sent_keys(headers)
        admin = self.admin_key is not None and path in ADMIN_PATHS
        matching = self._matching(sent, admin=admin)
        if matching is not None:
            return self.shared_refusal(path) if path in SHARED_PATHS and self.several_clients else matching
        protected = self.key is not None or bool(self.clients)
        if path in OPEN_PATHS or path in PAGE_PATHS:
            return STRANGER if protected else NOBODY
        if not admin and not protected:
            # Nothing is protected by a key here, but clients that send different ones have shares of their own.
            return Caller(owner_digest(sent[0])) if sent else NOBODY
        which = "the key of --admin-api-key" if admin else "the API key"
        return RequestError(
            f"{which} is missing or wrong; send Authorization: Bearer KEY, or X-Api-Key: KEY",
            code="invalid_api_key",
            status=401,
        )

    @property
    def secrets(self) -> list[str]:
        """All keys."""
        return [key for key in (self.key, self.admin_key, *(client.key for client in self.clients)) if key is not None]

    @property
    def several_clients(self) -> bool:
        """Whether there are several keys, and none for operators: then nobody may do what concerns all of them."""
        return self.admin_key is None and len(self.clients) + (self.key is not None) > 1

    @staticmethod
    def shared_refusal(what: str) -> RequestError:
        return RequestError(
            f"{what} is refused: it concerns all clients, and this server has several keys and none for operators;"
            " start it with --admin-api-key",
            code="admin_key_needed",
            status=403,
        )

    def _matching(self, sent: list[bytes], *, admin: bool) -> Caller | None:
        """The caller whose key was sent. All keys are compared, each in constant time.

        A key that was sent beside it does not count: otherwise, any client could name itself as any other one.
        """
        caller: Caller | None = None
        keys: list[tuple[str | None, ClientKey | None]] = [(self.admin_key, None)]
        if not admin:
            keys += [(self.key, None), *((client.key, client) for client in self.clients)]
        for key, client in keys:
            expected = b"" if key is None else key.encode()
            for sent_key in sent:
                if hmac.compare_digest(sent_key, expected):
                    owner = owner_digest(expected)
                    caller = Caller(owner, client, owner if self.clients and not self.share_cache else "")
        return caller

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of this origin may call: those of `origins`, and, if there are some or the server listens on a
        loopback address, those of this machine."""
        try:
            name = urlsplit(origin).hostname if "://" in origin else None
        except ValueError:  # of "http://[", for example
            name = None
        local = bool(self.loopback or self.origins) and name is not None and is_loopback(name)
        return ANY in self.origins or origin in self.origins or local

    def _foreign(self, path: str, headers: Headers) -> RequestError | None:
        """Requests of any method: reading responses is what DNS rebinding is for."""
        if self.loopback or self.hosts:
            host = _host_name(headers.get("host", ""))
            probe = path in OPEN_PATHS and is_address(host)  # orchestrators use addresses, and rebinding needs a name
            if host and not probe and not _allowed(host, self.hosts):
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


def sent_keys(headers: Headers) -> list[bytes]:
    """The keys in a request's headers, as they are on the wire: Authorization: Bearer KEY, X-Api-Key: KEY."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    keys = [token.strip(BLANKS) if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip(BLANKS)]
    return [key.encode("latin-1") for key in keys if key]


def owner_digest(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=8).hexdigest()


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
