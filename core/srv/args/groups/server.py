"""Arguments of the HTTP server and of the lifecycle of its processes."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, not_empty
from srv.args.spec import Arg

_WARMUP = "the server sends no warm-up request before it is ready"
_WATCHDOG = "a hung step is not detected yet"


class ServerArgs(NamedTuple):
    """Where the server listens, whom it serves, and what it accepts."""

    host: Annotated[str, Arg("Address to listen on.", not_empty(), metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Arg("TCP port to listen on.", between(1, 65535))] = 30000
    api_key: Annotated[
        str | None,
        Arg("Key that clients must send as a bearer token; if not set, none is required.", not_empty(), secret=True),
    ] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Arg("Minimum severity that is logged.")] = "info"
    max_request_bytes: Annotated[
        int,
        Arg("Maximum size of a request body; a larger one is refused with status 413.", at_least(1024), unit="bytes"),
    ] = 16 * 2**20
    max_stop_strings: Annotated[
        int, Arg("Maximum number of stop strings per request.", at_least(1), metavar="COUNT")
    ] = 16
    graceful_shutdown_seconds: Annotated[
        float,
        Arg("Time that running requests have to finish when the server shuts down.", at_least(0), unit="seconds"),
    ] = 30.0
    engine_start_timeout_seconds: Annotated[
        float, Arg("Time that the engine has to load the model and become ready.", above(0), unit="seconds")
    ] = 900.0
    skip_server_warmup: Annotated[
        bool, Arg("Skip the warm-up request at start-up.", planned=f"{_WARMUP}; there is nothing to skip")
    ] = True
    warmups: Annotated[
        tuple[str, ...], Arg("Names of warm-up routines to run before the server is ready.", planned=_WARMUP)
    ] = ()
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Time after which a step counts as hung, and the server is stopped.",
            above(0),
            planned=_WATCHDOG,
            unit="seconds",
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float,
        Arg(
            "Time after which a step counts as hung, which is only logged.", above(0), planned=_WATCHDOG, unit="seconds"
        ),
    ] = 300.0
    enable_cache_report: Annotated[
        bool,
        Arg(
            "Report in responses how many prompt tokens were found in the prefix cache.",
            planned="responses always contain it; omitting it is not implemented yet",
        ),
    ] = True
    file_storage_path: Annotated[
        Path, Arg("Folder for files that clients upload.", planned="uploading files is not implemented yet")
    ] = Path("srv_storage")
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's reasoning, so that it can be separated from the answer.",
            not_empty(),
            planned="separating reasoning from the answer is not implemented yet",
            metavar="NAME",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's tool calls.",
            not_empty(),
            planned="parsing tool calls is not implemented yet",
            metavar="NAME",
        ),
    ] = None
    tool_server: Annotated[
        str | None,
        Arg(
            "Servers of built-in tools: demo, or comma-separated addresses.",
            not_empty(),
            planned="calling tools is not implemented yet",
            metavar="ADDRESSES",
        ),
    ] = None
    enable_custom_logit_processor: Annotated[
        bool,
        Arg(
            "Run logit processors that clients send as code; only for clients that you trust.",
            planned="running code from clients is not implemented yet",
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool,
        Arg("Let clients request the model's hidden states (return_hidden_states of /generate)."),
    ] = False
