"""Middleware for what arguments let the server observe of each HTTP request: custom metric labels, the trace context,
and the bodies that a crash dump contains.

    scope ──► labels, traceparent ──► RecordedCaller ──► handlers, whose sequences append their records to it
                                        └──► Tracer, after the last byte of the response

It is installed only if one of these is asked for. Must not know endpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srv.args.groups.observe import ObserveArgs
from srv.errors import RequestError
from srv.server.http.failures import describe, error_response, report
from srv.server.observe.crash_dump import CrashRecorder, RecordedRequest
from srv.server.observe.records import CALLER, RecordedCaller
from srv.server.observe.tracing import TRACE_HEADERS, Tracer

MAX_LABEL_LENGTH = 64
MAX_HEADER_LENGTH = 4096


class CustomLabels:
    """Reads the custom metric labels of a request: a JSON object of strings in a header."""

    def __init__(self, observe: ObserveArgs) -> None:
        self.names = observe.tokenizer_metrics_allowed_custom_labels or ()
        self._header = observe.tokenizer_metrics_custom_labels_header

    def read(self, headers: Headers) -> tuple[str, ...]:
        """The values in the order of `names`, empty for labels that were not sent. Raises RequestError."""
        sent = headers.get(self._header) if self.names else None
        if sent is None:
            return ("",) * len(self.names)
        try:
            # Starlette decodes headers as Latin-1; JSON is UTF-8.
            labels: object = json.loads(sent.encode("latin-1").decode()) if len(sent) <= MAX_HEADER_LENGTH else None
        except ValueError:
            labels = None
        if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
            raise self._refused(f"{sent[:80]!r}", 'it must be a JSON object of strings, such as {"team": "search"}')
        for name, value in labels.items():
            if name not in self.names:
                allowed = ", ".join(self.names)
                raise self._refused(f"{name[:80]!r}", f"the server allows the labels {allowed}; leave it out")
            if len(value) > MAX_LABEL_LENGTH:
                raise self._refused(f"{name} = {value[:80]!r}", f"it is longer than {MAX_LABEL_LENGTH} characters")
        return tuple(labels.get(name, "") for name in self.names)

    def _refused(self, value: str, reason: str) -> RequestError:
        return RequestError(
            f"header {self._header}: {value} is refused: {reason}", code="invalid_labels", param=self._header
        )


class ObservingMiddleware:
    """ASGI middleware. `tracer`, `recorder`: None if nobody asks for traces or for crash dumps."""

    def __init__(
        self,
        app: ASGIApp,
        labels: CustomLabels,
        tracer: Tracer | None,
        recorder: CrashRecorder | None,
    ) -> None:
        self._app, self._labels, self._tracer, self._recorder = app, labels, tracer, recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival, headers, status = time.perf_counter(), Headers(scope=scope), 0
        recorded = None
        if self._recorder is not None:
            recorded = self._recorder.begin(scope["method"], scope["path"], headers.get("content-encoding", ""))

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            caller = self._caller(scope, headers)
        except RequestError as error:
            code, body = describe(error)
            report(scope, code, body)
            await error_response(code, body)(scope, receive, send_seen)
            return
        token = CALLER.set(caller)
        complete = False
        try:
            await self._app(scope, self._receiving(receive, recorded), send_seen)
            complete = True
        finally:
            CALLER.reset(token)
            self._ended(caller, recorded, arrival, status if complete else status or 500, complete)

    def _receiving(self, receive: Receive, recorded: RecordedRequest | None) -> Receive:
        recorder = self._recorder
        if recorder is None or recorded is None:
            return receive

        async def receive_recorded() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                recorder.add(recorded, message.get("body", b""))
            return message

        return receive_recorded

    def _caller(self, scope: Scope, headers: Headers) -> RecordedCaller:
        trace: Mapping[str, str] = {}
        if self._tracer is not None:
            trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        return RecordedCaller(scope["path"], self._labels.read(headers), dict(trace))

    def _ended(
        self, caller: RecordedCaller, recorded: RecordedRequest | None, arrival: float, status: int, done: bool
    ) -> None:
        if recorded is not None:
            recorded.status, recorded.complete = status, done and 0 < status < 500 and not caller.failed
        if self._tracer is not None and caller.records:
            self._tracer.export(caller, arrival, time.perf_counter(), status)


def add_observing(app: Starlette, observe: ObserveArgs, tracer: Tracer | None, recorder: CrashRecorder | None) -> None:
    """Add the middleware to an application, if an argument asks for something that it does."""
    labels = CustomLabels(observe)
    if labels.names or tracer is not None or recorder is not None:
        app.add_middleware(ObservingMiddleware, labels=labels, tracer=tracer, recorder=recorder)
