"""OpenTelemetry traces of requests: one span per HTTP request from its arrival to the last byte of its response, and
within it, per sequence, spans of the stages queue, prefill and decode.

    caller's span (traceparent) ──► "chat MODEL"          ├──────────────────────────────────────────────────┤
                                      queue               ├─────────┤
                                      prefill                        ├────────────┤
                                      decode                                       ├──────────────────────┤

The spans are made when the request has ended, from the times that were taken anyway; nothing happens per token. They
contain no text of prompts or outputs. Attributes follow the semantic conventions for generative AI, beside the names
that vLLM's dashboards use. Owns names and attributes. The packages of OpenTelemetry are an extra (`srv[trace]`).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from srv import __version__
from srv.errors import Refusal, Rejection
from srv.server.observe.records import RecordedCaller, SequenceRecord
from srv.types import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS = ("traceparent", "tracestate")
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HTTP, GRPC = "http/protobuf", "grpc"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/generate": "text_completion",
}


class Tracer:
    """Exports the traces of one server, in batches, on a thread of its own. Call `close` at the end."""

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        name = os.environ.get("OTEL_SERVICE_NAME", "srv")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("srv", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch = time.time_ns() - time.perf_counter_ns()  # of `perf_counter`, in nanoseconds

    def export(self, caller: RecordedCaller, arrival: float, end: float, status: int) -> None:
        """The spans of a request whose response has ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(caller.path, caller.path.strip("/"))
        attributes = self._attributes(operation, caller.records, end - arrival, status)
        context = self._propagator.extract(caller.trace)
        root = self._tracer.start_span(
            f"{operation} {self._model}", context, SpanKind.SERVER, attributes, start_time=self._nanoseconds(arrival)
        )
        if status >= 500:
            root.set_status(StatusCode.ERROR, f"HTTP {status}")
        inside = set_span_in_context(root, context)
        for record in caller.records:
            for stage, (begin, ended) in record.stages().items():
                span = self._tracer.start_span(
                    stage,
                    inside,
                    attributes={"gen_ai.request.id": record.id},
                    start_time=self._nanoseconds(begin),
                )
                span.end(self._nanoseconds(max(begin, ended)))
        root.end(self._nanoseconds(end))

    def _nanoseconds(self, seconds: float) -> int:
        return self._epoch + int(seconds * 1e9)

    def _attributes(self, operation: str, records: list[SequenceRecord], seconds: float, status: int) -> dict[str, Any]:
        first = records[0]
        tokens = sum(record.completion_tokens for record in records)
        prompts = [record for record in records if record.output_index == 0] or records[:1]
        prompt_tokens = sum(record.prompt_tokens for record in prompts)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "srv",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": first.id,
            "gen_ai.request.n": first.outputs,
            "gen_ai.response.finish_reasons": [record.reason.value for record in records],
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.usage.num_sequences": len(records),
            "gen_ai.usage.cached_tokens": sum(record.cached_tokens for record in prompts),
            "gen_ai.latency.e2e": seconds,
            "http.response.status_code": status,
        }
        if first.spec is not None and isinstance(first.spec.params, SamplingParams):
            params = first.spec.params
            attributes |= {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.max_tokens": params.max_tokens,
            }
        if first.first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first.first_token - first.arrival
        for stage, (begin, ended) in first.stages().items():
            name = "time_in_queue" if stage == "queue" else f"time_in_model_{stage}"
            attributes[f"gen_ai.latency.{name}"] = ended - begin
        return attributes

    def close(self) -> None:
        """Export what is left, for at most a few seconds."""
        self._provider.force_flush(3000)
        self._provider.shutdown()


def make_tracer(model: str, endpoint: str, who: str) -> Tracer:
    """The tracer for a collector. who: set --enable-trace. Raises Refusal if the packages are not installed."""
    protocol = os.environ.get(PROTOCOL_VARIABLE, GRPC)
    if protocol not in (GRPC, HTTP):
        reason = f"the exporter has the protocols {GRPC} and {HTTP}"
        remedy = f"Set {PROTOCOL_VARIABLE} to one of them, or unset it."
        raise Refusal([Rejection("unknown_protocol", PROTOCOL_VARIABLE, protocol, "environment", reason, remedy)])
    try:
        return Tracer(model, _exporter(protocol, endpoint))
    except ImportError as error:
        reason = f"the packages of OpenTelemetry cannot be imported ({error})"
        remedy = "Install them with pip install 'srv[trace]', or leave --enable-trace out."
        raise Refusal([Rejection("not_installed", "enable_trace", "true", who, reason, remedy)]) from error


def _exporter(protocol: str, endpoint: str) -> SpanExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    return HttpExporter(endpoint=url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces")
