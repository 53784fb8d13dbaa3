"""What the API process passes to hooks and to the request log: requests, and refusals. What nobody observes costs
nothing.

Must not know HTTP or the format of any protocol.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from srv.hooks import FirstToken, Refused, RequestFinished, RequestStarted
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.server.observe.records import CALLER, SequenceRecord
from srv.server.observe.request_log import RequestLog
from srv.types import PoolingParams, RequestSpec


class Observers:
    """Calls the hooks of one process, which are bound once."""

    def __init__(self, hooks: Hooks = NO_HOOKS, log: RequestLog | None = None) -> None:
        self.hooks, self._log = hooks, log
        self._started = hooks.bind("srv_request_started")
        self._first_token = hooks.bind("srv_first_token")
        self._finished = hooks.bind("srv_request_finished")
        self._refused = hooks.bind("srv_refused")

    def begin(self, name: str, arrival: float, outputs: int = 1, index: int = 0) -> SequenceRecord:
        """The record of a sequence of the request that is being handled. `arrival`: of the client's request.

        `outputs`, `index`: sequences of its prompt, and its number among them.
        """
        keeps_text = self._log is not None and self._log.shows_text
        texts: list[str] | None = [] if keeps_text else None
        return SequenceRecord(name, arrival, CALLER.get(), outputs=outputs, output_index=index, texts=texts)

    def started(self, spec: RequestSpec) -> None:
        """A request is sent to the engine."""
        if self._log is not None:
            self._log.started(spec)
        if self._started is not None:
            maximum = 0 if isinstance(spec.params, PoolingParams) else spec.params.max_tokens
            self._started(
                RequestStarted(id=spec.id, prompt_tokens=len(spec.tokens), max_tokens=maximum, time=time.time())
            )

    def first_token(self, name: str, seconds: float) -> None:
        """`seconds`: since the client's request arrived."""
        if self._first_token is not None:
            self._first_token(FirstToken(id=name, seconds=seconds))

    def ended(self, record: SequenceRecord) -> None:
        """A sequence has ended, also one that was aborted before it was sent to the engine."""
        if record.caller is not None:
            record.caller.records.append(record)
        if record.spec is None:
            return
        if self._log is not None:
            self._log.ended(record)
        if self._finished is not None:
            self._finished(
                RequestFinished(
                    id=record.id,
                    reason=record.reason.value,
                    prompt_tokens=record.prompt_tokens,
                    cached_tokens=record.cached_tokens,
                    completion_tokens=record.completion_tokens,
                    seconds=record.ended - record.arrival,
                )
            )

    def refused(self, status: int, body: Mapping[str, Any]) -> None:
        """An HTTP response with this error body; statuses that report a failure of the server are no refusals."""
        if self._refused is not None and (status < 500 or status == 503):
            error = body["error"]
            self._refused(Refused(code=error["code"], what=error["param"], status=status, message=error["message"]))
