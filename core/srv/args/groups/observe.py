"""Arguments of observability: logs, metrics, traces, events."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import ascending, at_least, between, bucket_rule, json_object, not_empty
from srv.args.spec import Arg

_REQUEST_LOG = "logging requests is not implemented yet"
_BUCKETS = "the bucket bounds of the latency histograms are fixed so far"
_TOKEN_HISTOGRAMS = "histograms of token counts are not implemented yet"
_LABELS = "custom metric labels are not implemented yet"
_TRACES = "traces are not implemented yet"


class ObserveArgs(NamedTuple):
    """What is logged, measured and traced."""

    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Arg(
            "Minimum severity that the HTTP server logs; that of --log-level if not set.",
            planned="one level applies to the whole server so far",
        ),
    ] = None
    log_requests: Annotated[bool, Arg("Log every request that is received.", planned=_REQUEST_LOG)] = False
    log_requests_level: Annotated[
        int,
        Arg(
            "How much of a request is logged: its metadata (0), also sampling parameters (1), also the beginning of "
            "input and output (2), all of them (3).",
            between(0, 3),
            planned=_REQUEST_LOG,
            metavar="LEVEL",
        ),
    ] = 2
    crash_dump_folder: Annotated[
        Path | None,
        Arg(
            "Folder to which the requests of the last five minutes before a crash are dumped.",
            planned="dumping requests after a crash is not implemented yet",
        ),
    ] = None
    show_time_cost: Annotated[
        bool,
        Arg(
            "Log how long marked sections of the code take.",
            planned="timing sections of the code is not implemented yet",
        ),
    ] = False
    enable_request_time_stats_logging: Annotated[
        bool, Arg("Log how long each request spent in each stage.", planned=_REQUEST_LOG)
    ] = False
    decode_log_interval: Annotated[
        int,
        Arg(
            "Decode steps between two log lines with statistics.",
            at_least(1),
            planned="statistics are in the metrics; logging them is not implemented yet",
            unit="steps",
        ),
    ] = 40
    gc_warning_threshold_secs: Annotated[
        float,
        Arg(
            "Duration above which a garbage collection is logged; 0 logs none.",
            at_least(0),
            planned="logging of garbage collections is not implemented yet",
            unit="seconds",
        ),
    ] = 0.0
    enable_metrics: Annotated[
        bool,
        Arg(
            "Serve Prometheus metrics at /metrics.",
            planned="metrics are always served; disabling them is not implemented yet",
        ),
    ] = True
    enable_metrics_for_all_schedulers: Annotated[
        bool,
        Arg(
            "Let the scheduler of every rank report its own metrics.",
            planned="there is only one scheduler so far, which reports metrics",
        ),
    ] = False
    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        Arg(
            "Bucket bounds of the histogram of time to first token.",
            ascending(),
            planned=_BUCKETS,
            unit="seconds",
        ),
    ] = None
    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None,
        Arg("Bucket bounds of the histogram of inter-token latency.", ascending(), planned=_BUCKETS, unit="seconds"),
    ] = None
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None,
        Arg(
            "Bucket bounds of the histogram of end-to-end request latency.",
            ascending(),
            planned=_BUCKETS,
            unit="seconds",
        ),
    ] = None
    collect_tokens_histogram: Annotated[
        bool, Arg("Report histograms of prompt and output token counts.", planned=_TOKEN_HISTOGRAMS)
    ] = False
    prompt_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Bucket bounds of the histogram of prompt tokens.", bucket_rule(), planned=_TOKEN_HISTOGRAMS, metavar="RULE"
        ),
    ] = None
    generation_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Bucket bounds of the histogram of output tokens.", bucket_rule(), planned=_TOKEN_HISTOGRAMS, metavar="RULE"
        ),
    ] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        Arg("HTTP header in which clients send custom metric labels.", not_empty(), planned=_LABELS, metavar="HEADER"),
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...] | None,
        Arg("Custom metric labels that clients may send.", not_empty(), planned=_LABELS, metavar="LABEL"),
    ] = None
    enable_trace: Annotated[bool, Arg("Send OpenTelemetry traces of requests.", planned=_TRACES)] = False
    oltp_traces_endpoint: Annotated[
        str, Arg("OpenTelemetry collector that receives the traces.", not_empty(), planned=_TRACES, metavar="HOST:PORT")
    ] = "localhost:4317"
    kv_events_config: Annotated[
        str | None,
        Arg(
            "JSON object that configures where prefix-cache events are published; if not set, nowhere.",
            json_object(),
            planned="publishing prefix-cache events is not implemented yet",
            metavar="JSON",
        ),
    ] = None
    enable_layer_markers: Annotated[
        bool,
        Arg("Mark each layer for the device's profiler.", planned="markers for profilers are not implemented yet"),
    ] = False
