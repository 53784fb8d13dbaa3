"""Arguments of the HTTP server and of the lifecycle of its processes."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, among, at_least, between, not_empty, path_prefix
from srv.args.spec import Arg
from srv.reply.formats import (
    REASONING_EXTENSIONS,
    REASONING_NAMES,
    REASONING_SYNONYMS,
    TOOL_EXTENSIONS,
    TOOL_NAMES,
    TOOL_SYNONYMS,
)


class ServerArgs(NamedTuple):
    """Where the server listens, whom it serves, and what it accepts."""

    host: Annotated[str, Arg("Address to listen on.", not_empty(), metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Arg("TCP port to listen on.", between(1, 65535))] = 30000
    api_key: Annotated[
        str | None,
        Arg(
            "Key that clients must send as a bearer token; if not set, none is required. Every user of the machine can"
            " read it with ps: use --api-key-file, or the environment variable.",
            not_empty(),
            secret=True,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Arg("File whose first line is the key that clients must send; instead of --api-key.", metavar="FILE"),
    ] = None
    api_keys_file: Annotated[
        Path | None,
        Arg(
            "File of further keys, one per line, each optionally followed by name=NAME, requests_per_minute=N and"
            " concurrent_requests=N; a request beyond a limit is refused with status 429.",
            metavar="FILE",
        ),
    ] = None
    share_cache: Annotated[
        bool,
        Arg(
            "Let the keys of --api-keys-file share the prefix cache. Each of them can then find out whether another one"
            " has sent a certain prompt.",
            only_with=("api_keys_file",),
        ),
    ] = False
    admin_api_key: Annotated[
        str | None,
        Arg(
            "Key for /flush_cache, /abort_request, /server_info, /pause_generation and other paths of operators instead"
            " of --api-key; all other paths accept it, too. Like --api-key, it can be read with ps.",
            not_empty(),
            secret=True,
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Host names by which clients may call the server, besides localhost and loopback addresses; * allows all."
            " Checked if the server listens on a loopback address or this is set; /health, /metrics and /ping can also"
            " be asked for by address.",
            metavar="NAMES",
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Origins (https://host:port) of the web pages that may call the server, besides those of this machine; *"
            " allows all. Checked like --allowed-hosts.",
            metavar="ORIGINS",
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None, Arg("PEM certificate with which the server speaks HTTPS instead of HTTP.", metavar="FILE")
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Arg("PEM key of the certificate, if that file does not hold it.", metavar="FILE", only_with=("ssl_certfile",)),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        Arg("Password of the key.", not_empty(), secret=True, only_with=("ssl_certfile",), metavar="PASSWORD"),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Arg(
            "PEM certificates of authorities; only clients with a certificate of one of them are accepted.",
            metavar="FILE",
            only_with=("ssl_certfile",),
        ),
    ] = None
    uds: Annotated[Path | None, Arg("Unix socket to listen on instead of --host and --port.", metavar="FILE")] = None
    root_path: Annotated[
        str,
        Arg(
            "Path under which a proxy serves this server, such as /llm; whether the proxy removes it does not matter.",
            path_prefix(),
            metavar="PATH",
            aliases=("fastapi_root_path",),
        ),
    ] = ""
    access_log: Annotated[
        bool, Arg("Log one line per HTTP response: address, method, path, status, size and time.")
    ] = False
    ui: Annotated[bool, Arg("Serve a page for a browser at /, with a chat and the load of the server.")] = True
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Arg("Minimum severity that is logged.")] = "info"
    max_request_bytes: Annotated[
        int,
        Arg("Maximum size of a request body; a larger one is refused with status 413.", at_least(1024), unit="bytes"),
    ] = 16 * 2**20
    max_held_request_bytes: Annotated[
        int,
        Arg(
            "Maximum size of the bodies of all requests without a response together; beyond it, requests are refused"
            " with status 503.",
            at_least(1024),
            unit="bytes",
        ),
    ] = 256 * 2**20
    max_connections: Annotated[
        int,
        Arg(
            "Maximum number of open connections. A further one takes the place of one that sends no request; if there"
            " is none, it can ask for /health, /metrics and /ping, and is refused anything else with status 503.",
            at_least(1),
            metavar="COUNT",
        ),
    ] = 1000
    connection_timeout_seconds: Annotated[
        float,
        Arg(
            "Time for which a connection may be idle, take to send the head or the body of a request, or leave its"
            " response unread; then it is closed, and its requests are aborted.",
            above(0),
            unit="seconds",
        ),
    ] = 60.0
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
        bool,
        Arg("Accept requests without sending one first; the engine has run steps while it started anyway."),
    ] = True
    warmups: Annotated[
        tuple[str, ...],
        Arg(
            "Requests that the server sends to itself before it is ready: chat (through the chat template), long_prompt"
            " (2,048 tokens), batch (8 at the same time).",
            among("chat", "long_prompt", "batch"),
            metavar="NAMES",
        ),
    ] = ()
    watchdog_timeout: Annotated[
        float,
        Arg(
            "Time for which a hung engine may be silent; then it is ended, and the server exits with status 1.",
            at_least(3),
            unit="seconds",
        ),
    ] = 300.0
    soft_watchdog_timeout: Annotated[
        float,
        Arg(
            "Time for which a hung engine may be silent; then /health answers with status 503 until the engine goes on,"
            " and the stacks of its threads are logged.",
            at_least(3),
            unit="seconds",
        ),
    ] = 300.0
    enable_cache_report: Annotated[
        bool,
        Arg("Report in responses how many prompt tokens were found in the prefix cache."),
    ] = True
    file_storage_path: Annotated[
        Path,
        Arg(
            "Folder for the files of /v1/files: those that clients upload for batches, and those with the results; made"
            " for the first one.",
            metavar="FOLDER",
        ),
    ] = Path("srv_storage")
    reasoning_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's reasoning, which separates it from the answer; chosen by the chat template if not"
            " set, and none leaves all text as it is.",
            choices=REASONING_NAMES,
            further_choices=REASONING_EXTENSIONS.names,
            synonyms=REASONING_SYNONYMS,
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Arg(
            "Format of the model's tool calls; chosen by the chat template if not set, and with none, requests with"
            " tools are refused.",
            choices=TOOL_NAMES,
            further_choices=TOOL_EXTENSIONS.names,
            synonyms=TOOL_SYNONYMS,
        ),
    ] = None
    tool_server: Annotated[
        str | None,
        Arg(
            "Servers of built-in tools: demo, or comma-separated addresses.",
            planned="the server calls no tools itself: clients run the calls that it returns",
            metavar="ADDRESSES",
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Arg(
            "Let requests bring a Jinja chat template (chat_template) instead of the model's. It is rendered in such a"
            " sandbox as the model's, with the same limits on time and memory.",
        ),
    ] = False
    enable_custom_logit_processor: Annotated[
        bool,
        Arg(
            "Let requests choose logit processors by name (custom_logit_processor) among those that installed"
            " distributions provide; code that a client sends is never run.",
        ),
    ] = False
    enable_return_hidden_states: Annotated[
        bool,
        Arg("Let clients request the model's hidden states (return_hidden_states of /generate)."),
    ] = False
