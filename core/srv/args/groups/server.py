"""Arguments of the HTTP server and of the life of its processes."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, not_empty
from srv.args.spec import Arg

_WARMUP = "the server makes no request of its own before it is ready"
_WATCHDOG = "a step that hangs is not noticed yet"


class ServerArgs(NamedTuple):
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
    skip_server_warmup: Annotated[
        bool, Arg("Be ready without a request of the server's own first.", planned=f"{_WARMUP}; there is nothing to do")
    ] = True
    warmups: Annotated[
        tuple[str, ...], Arg("Names of warm-up routines to run before the server is ready.", planned=_WARMUP)
    ] = ()
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Time after which a step counts as hung, and the server ends.", above(0), planned=_WATCHDOG, unit="seconds"
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float,
        Arg(
            "Time after which a step counts as hung, and is only reported.", above(0), planned=_WATCHDOG, unit="seconds"
        ),
    ] = 300.0
    enable_cache_report: Annotated[
        bool,
        Arg(
            "Tell clients how many prompt tokens were found in the prefix cache.",
            planned="answers always tell it; leaving it out is not implemented yet",
        ),
    ] = True
    file_storage_path: Annotated[
        Path, Arg("Folder for files that clients upload.", planned="uploading files is not implemented yet")
    ] = Path("srv_storage")
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "Format in which the model writes its reasoning, to be told apart from its answer.",
            not_empty(),
            planned="telling reasoning from answers is not implemented yet",
            metavar="NAME",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Arg(
            "Format in which the model writes calls of tools.",
            not_empty(),
            planned="reading calls of tools is not implemented yet",
            metavar="NAME",
        ),
    ] = None
    tool_server: Annotated[
        str | None,
        Arg(
            "Servers of built-in tools: demo, or addresses separated by commas.",
            not_empty(),
            planned="calling tools is not implemented yet",
            metavar="ADDRESSES",
        ),
    ] = None
    enable_custom_logit_processor: Annotated[
        bool,
        Arg(
            "Run code that clients send to change logits; only for clients you trust.",
            planned="code from clients is never run yet",
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool,
        Arg(
            "Let clients ask for the model's hidden states.",
            planned="hidden states stay in the engine; sending them is not implemented yet",
        ),
    ] = False
