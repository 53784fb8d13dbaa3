"""An OpenTelemetry collector in a process of its own: it receives spans by gRPC and by HTTP, and writes them to a file.

python otlp_collector.py FILE      prints the two ports, then serves until it is killed; one JSON line per span
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Collector(NamedTuple):
    """A running collector. `grpc`, `http`: HOST:PORT."""

    file: Path
    grpc: str
    http: str

    def spans(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@contextlib.contextmanager
def collector(file: Path) -> Iterator[Collector]:
    """A collector that writes to `file`; it is killed at the end."""
    file.touch()
    process = subprocess.Popen([sys.executable, __file__, str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        grpc, http = process.stdout.readline().split()
        yield Collector(file, f"127.0.0.1:{grpc}", f"127.0.0.1:{http}")
    finally:
        process.kill()
        process.wait()


def main(file: Path) -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    lock = threading.Lock()

    def write(request: Any) -> Any:
        with lock, file.open("a") as out:
            for span in _spans(request):
                out.write(json.dumps(span) + "\n")
        return trace_service_pb2.ExportTraceServiceResponse()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            return write(request)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces", self.path
            answer = write(trace_service_pb2.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    by_http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(port, by_http.server_port, flush=True)
    by_http.serve_forever()


def _spans(request: Any) -> Iterator[dict[str, Any]]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "kind": span.kind,
                    "begin": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": {attribute.key: _value(attribute.value) for attribute in span.attributes},
                }


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
