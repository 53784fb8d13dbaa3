"""Arguments of observability: logs, metrics, traces, events."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import ascending, at_least, between, bucket_rule, not_empty
from srv.args.spec import Arg


class ObserveArgs(NamedTuple):
    """What is logged, measured and traced."""

    log_level_http: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Arg(
            "Minimum severity that the HTTP server logs; that of --log-level if not set. With info or debug, it also "
            "logs every response.",
        ),
    ] = None
    log_requests: Annotated[
        bool,
        Arg("Log every request when it is received and when it has ended; what looks like a credential is redacted."),
    ] = False
    log_requests_level: Annotated[
        int,
        Arg(
            "How much of a request is logged: its metadata (0), also sampling parameters (1), also the beginning of "
            "input and output (2), all of them (3).",
            between(0, 3),
            only_with=("log_requests",),
            metavar="LEVEL",
        ),
    ] = 2
    crash_dump_folder: Annotated[
        Path | None,
        Arg(
            "Folder to which the requests of the last five minutes before a crash are dumped; `srv replay` sends them "
            "again. Dumps contain prompts.",
        ),
    ] = None
    show_time_cost: Annotated[
        bool,
        Arg(
            "Log how long the parts of a step take in the engine, on average, with the statistics of "
            "--decode-log-interval."
        ),
    ] = False
    enable_request_time_stats_logging: Annotated[
        bool, Arg("Log how long each request spent in each stage: queue, prefill, decode.")
    ] = False
    decode_log_interval: Annotated[
        int,
        Arg(
            "Steps of the engine between two log lines with statistics.",
            at_least(1),
            unit="steps",
        ),
    ] = 40
    gc_warning_threshold_secs: Annotated[
        float,
        Arg(
            "Duration above which a garbage collection is logged; 0 logs none.",
            at_least(0),
            unit="seconds",
        ),
    ] = 0.0
    enable_metrics: Annotated[
        bool,
        Arg(
            "Count requests, and serve Prometheus metrics at /metrics, also under the names of vLLM and SGLang.",
        ),
    ] = True
    enable_metrics_for_all_schedulers: Annotated[
        bool,
        Arg(
            "Let the scheduler of every rank report its own metrics.",
            planned="all ranks share one scheduler, which reports metrics; one per replica comes with data parallelism",
        ),
    ] = False
    bucket_time_to_first_token: Annotated[
        tuple[float, ...] | None,
        Arg(
            "Bucket bounds of the histogram of time to first token.",
            ascending(),
            unit="seconds",
        ),
    ] = None
    bucket_inter_token_latency: Annotated[
        tuple[float, ...] | None,
        Arg("Bucket bounds of the histogram of inter-token latency.", ascending(), unit="seconds"),
    ] = None
    bucket_e2e_request_latency: Annotated[
        tuple[float, ...] | None,
        Arg(
            "Bucket bounds of the histogram of end-to-end request latency.",
            ascending(),
            unit="seconds",
        ),
    ] = None
    collect_tokens_histogram: Annotated[bool, Arg("Report histograms of prompt and output token counts.")] = False
    prompt_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Bucket bounds of the histogram of prompt tokens.",
            bucket_rule(),
            only_with=("collect_tokens_histogram",),
            metavar="RULE",
        ),
    ] = None
    generation_tokens_buckets: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Bucket bounds of the histogram of output tokens.",
            bucket_rule(),
            only_with=("collect_tokens_histogram",),
            metavar="RULE",
        ),
    ] = None
    tokenizer_metrics_custom_labels_header: Annotated[
        str,
        Arg(
            "HTTP header in which clients send custom metric labels, as a JSON object of strings.",
            not_empty(),
            metavar="HEADER",
        ),
    ] = "x-custom-labels"
    tokenizer_metrics_allowed_custom_labels: Annotated[
        tuple[str, ...] | None,
        Arg(
            "Custom metric labels that clients may send; the metrics of requests get them.",
            not_empty(),
            metavar="LABEL",
        ),
    ] = None
    enable_trace: Annotated[bool, Arg("Send OpenTelemetry traces of requests (needs the extra srv[trace]).")] = False
    oltp_traces_endpoint: Annotated[
        str,
        Arg(
            "OpenTelemetry collector that receives the traces, by gRPC, or by HTTP if the environment variable "
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is http/protobuf.",
            not_empty(),
            only_with=("enable_trace",),
            metavar="HOST:PORT",
        ),
    ] = "localhost:4317"
    kv_events_config: Annotated[
        str | None,
        Arg(
            "JSON object that configures where prefix-cache events are published; if not set, nowhere.",
            planned="publishing prefix-cache events is not implemented yet",
            metavar="JSON",
        ),
    ] = None
    enable_layer_markers: Annotated[
        bool,
        Arg(
            "Mark what each layer computes by its name, such as model.layers.3.self_attn, in traces of the built-in "
            "profiler and for the profiler of the device's vendor. A captured step has these marks only while it is "
            "captured, so use it with --disable-graphs."
        ),
    ] = False
