"""Where a server listens, and with which certificate: opened and checked before anything slow is started.

Must not know HTTP.
"""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.errors import Refusal, Rejection

if TYPE_CHECKING:
    from srv.args.statement import Resolved

_BACKLOG = 2048  # connections that wait to be accepted; the default of uvicorn


def listen(resolved: Resolved) -> socket.socket:
    """Open the port, or the Unix socket.

    The socket listens immediately: two sockets that are only bound would share the port, and the second server would
    fail only after it has loaded its weights. Until the server is ready, connections wait in the backlog. Raises
    Refusal.
    """
    server = resolved.config.server
    if server.uds is not None:
        return _listen_on_file(resolved, server.uds.expanduser())
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Refusal([_cannot_listen(resolved, error)]) from error
    return listener


def close(resolved: Resolved, listener: socket.socket) -> None:
    """Close what `listen` has opened, and remove the file of a Unix socket."""
    listener.close()
    path = resolved.config.server.uds
    if path is not None:
        path.expanduser().unlink(missing_ok=True)


def address(resolved: Resolved) -> str:
    """Where clients reach the server, for the log."""
    server = resolved.config.server
    if server.uds is not None:
        return f"unix:{server.uds}"
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"{'https' if server.ssl_certfile else 'http'}://{host}:{server.port}{server.root_path}"


def tls_options(resolved: Resolved) -> dict[str, Any]:
    """The options of `uvicorn.Config` for TLS; {} without it.

    With --ssl-ca-certs, only clients with a certificate of one of these authorities are accepted. Raises Refusal for
    files that cannot be used.
    """
    server = resolved.config.server
    if server.ssl_certfile is None:
        return {}
    options: dict[str, Any] = {
        "ssl_certfile": server.ssl_certfile.expanduser(),
        "ssl_keyfile": None if server.ssl_keyfile is None else server.ssl_keyfile.expanduser(),
        "ssl_keyfile_password": server.ssl_keyfile_password,
    }
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    password = server.ssl_keyfile_password or ""  # without one, OpenSSL would ask on the terminal
    try:
        context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"], password)
    except (OSError, ValueError) as error:
        reason = f"the certificate and its key cannot be used ({error})"
        remedy = "Give a PEM certificate, its key with --ssl-keyfile, and the key's password if it has one."
        raise Refusal([_rejection(resolved, "bad_certificate", "ssl_certfile", reason, remedy)]) from None
    if server.ssl_ca_certs is not None:
        options |= {"ssl_ca_certs": server.ssl_ca_certs.expanduser(), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        try:
            context.load_verify_locations(options["ssl_ca_certs"])
        except (OSError, ValueError) as error:
            reason = f"it has no certificates of authorities ({error})"
            raise Refusal(
                [_rejection(resolved, "bad_certificate", "ssl_ca_certs", reason, "Give a PEM file.")]
            ) from None
    return options


def _rejection(resolved: Resolved, code: str, name: str, reason: str, remedy: str) -> Rejection:
    return Rejection(code, name, str(resolved.config.get(name)), resolved.provenance[name].owner, reason, remedy)


def _listen_on_file(resolved: Resolved, path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()  # of a server that was killed
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"srv cannot listen on {path}: {error.strerror or error}"
        remedy = "Give the path of a file that does not exist, in a folder that exists and is writable."
        raise Refusal([_rejection(resolved, "socket_unavailable", "uds", reason, remedy)]) from error
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def _cannot_listen(resolved: Resolved, error: OSError) -> Rejection:
    """The rejection of the host or of the port, whichever is the cause, with its source."""
    host, port = resolved.config.server.host, resolved.config.server.port
    reason = f"srv cannot listen on {host}:{port}: {error.strerror or error}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        remedy = "Set --host to an address of this machine (127.0.0.1: this machine only, 0.0.0.0: all networks)."
        return _rejection(resolved, "host_unavailable", "host", reason, remedy)
    remedy = "Stop the process that uses it, or choose another port with --port (or --host)."
    return _rejection(resolved, "port_unavailable", "port", reason, remedy)
