"""Arguments about what the server tells of itself: logs, metrics, traces, events."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, bucket_rule, json_object, not_empty, rising
from srv.args.spec import Arg

_REQUEST_LOG = "logging requests is not implemented yet"
_BUCKETS = "the bounds of the latency histograms are fixed so far"
_TOKEN_HISTOGRAMS = "histograms of token counts are not implemented yet"
_LABELS = "metrics have no labels of the client's choice yet"
_TRACES = "traces are not implemented yet"


class ObserveArgs(NamedTuple):
    """What is logged, counted and traced."""

    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Arg(
            "Least severity that the HTTP server logs; that of --log-level if not set.",
            planned="one level holds for the whole server so far",
        ),
    ] = None
    log_requests: Annotated[bool, Arg("Log every request that is served.", planned=_REQUEST_LOG)] = False
    log_requests_level: Annotated[
        int,
        Arg(
            "How much of a request is logged: its metadata (0), also sampling parameters (1), also parts of input and "
            "output (2), all of them (3).",
            between(0, 3),
            planned=_REQUEST_LOG,
            metavar="LEVEL",
        ),
    ] = 2
    crash_dump_folder: Annotated[
        Path | None,
        Arg(
            "Folder for the requests of the last five minutes before a crash.",
            planned="requests are not kept for the case of a crash yet",
        ),
    ] = None
    show_time_cost: Annotated[
        bool,
        Arg("Log how long marked parts of the code take.", planned="timing parts of the code is not implemented yet"),
    ] = False
    enable_request_time_stats_logging: Annotated[
        bool, Arg("Log where the time of each request went.", planned=_REQUEST_LOG)
    ] = False
    decode_log_interval: Annotated[
        int,
        Arg(
            "Steps of output between two lines of statistics in the log.",
            at_least(1),
            planned="statistics are in the metrics; writing them to the log is not implemented yet",
            unit="steps",
        ),
    ] = 40
    gc_warning_threshold_secs: Annotated[
        float,
        Arg(
            "Garbage collection that takes longer is logged; 0 logs none.",
            at_least(0),
            planned="watching garbage collection is not implemented yet",
            unit="seconds",
        ),
    ] = 0.0
    enable_metrics: Annotated[
        bool,
        Arg(
            "Serve Prometheus metrics at /metrics.",
            planned="metrics are always served; turning them off is not implemented yet",
        ),
    ] = True
    enable_metrics_for_all_schedulers: Annotated[
        bool,
        Arg(
            "Let every rank's scheduler report metrics of its own.",
            planned="there is one scheduler so far, and it reports",
        ),
    ] = False
    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        Arg(
            "Bounds of the histogram of times to the first token.",
            rising(),
            planned=_BUCKETS,
            unit="seconds",
        ),
    ] = None
    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None,
        Arg("Bounds of the histogram of times between tokens.", rising(), planned=_BUCKETS, unit="seconds"),
    ] = None
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None,
        Arg("Bounds of the histogram of whole requests' times.", rising(), planned=_BUCKETS, unit="seconds"),
    ] = None
    collect_tokens_histogram: Annotated[
        bool, Arg("Count prompt and output tokens in histograms.", planned=_TOKEN_HISTOGRAMS)
    ] = False
    prompt_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg("Bounds of the histogram of prompt tokens.", bucket_rule(), planned=_TOKEN_HISTOGRAMS, metavar="RULE"),
    ] = None
    generation_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg("Bounds of the histogram of output tokens.", bucket_rule(), planned=_TOKEN_HISTOGRAMS, metavar="RULE"),
    ] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        Arg("HTTP header in which clients send labels for metrics.", not_empty(), planned=_LABELS, metavar="HEADER"),
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...] | None, Arg("Labels that clients may send.", not_empty(), planned=_LABELS, metavar="LABEL")
    ] = None
    enable_trace: Annotated[bool, Arg("Send OpenTelemetry traces of requests.", planned=_TRACES)] = False
    oltp_traces_endpoint: Annotated[
        str, Arg("Collector that takes the traces.", not_empty(), planned=_TRACES, metavar="HOST:PORT")
    ] = "localhost:4317"
    kv_events_config: Annotated[
        str | None,
        Arg(
            "JSON object that says where to publish what enters and leaves the prefix cache; if not set, nowhere.",
            json_object(),
            planned="publishing events of the prefix cache is not implemented yet",
            metavar="JSON",
        ),
    ] = None
    enable_layer_markers: Annotated[
        bool,
        Arg("Mark each layer for the device's profiler.", planned="marks for profilers are not implemented yet"),
    ] = False
