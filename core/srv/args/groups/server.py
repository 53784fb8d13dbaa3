"""Arguments of the HTTP server and of the life of its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from srv.args.checks import above, at_least, between, not_empty
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """Where the server listens, whom it serves, and what it takes."""

    host: Annotated[str, Arg("Address to listen on.", not_empty(), metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Arg("TCP port to listen on.", between(1, 65535))] = 30000
    api_key: Annotated[
        str | None,
        Arg("Key that clients must send as bearer token; if not set, none is asked for.", not_empty(), secret=True),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Arg("Least severity that is logged.")] = "info"
    max_request_bytes: Annotated[
        int, Arg("Longest body of a request; a longer one gets status 413.", at_least(1024), unit="bytes")
    ] = 16 * 2**20
    max_stop_strings: Annotated[int, Arg("Most stop strings of one request.", at_least(1), metavar="COUNT")] = 16
    graceful_shutdown_seconds: Annotated[
        float,
        Arg("Time that running requests have to finish when the server is told to stop.", at_least(0), unit="seconds"),
    ] = 30.0
    engine_start_timeout_seconds: Annotated[
        float, Arg("Time that the engine has to load the model and get ready.", above(0), unit="seconds")
    ] = 900.0
