"""What the API process passes to hooks: requests, and refusals. Each part costs nothing if no plugin observes it.

Must not know HTTP or the format of any protocol.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from srv.hooks import FirstToken, Refused, RequestFinished, RequestStarted
from srv.platform.hook_plugins import NO_HOOKS, Hooks
from srv.types import FinishReason, PoolingParams, RequestSpec


class Observers:
    """Calls the hooks of one process, which are bound once."""

    def __init__(self, hooks: Hooks = NO_HOOKS) -> None:
        self.hooks = hooks
        self._started = hooks.bind("srv_request_started")
        self._first_token = hooks.bind("srv_first_token")
        self._finished = hooks.bind("srv_request_finished")
        self._refused = hooks.bind("srv_refused")

    def started(self, spec: RequestSpec) -> None:
        """A request is sent to the engine."""
        if self._started is not None:
            maximum = 0 if isinstance(spec.params, PoolingParams) else spec.params.max_tokens
            self._started(
                RequestStarted(id=spec.id, prompt_tokens=len(spec.tokens), max_tokens=maximum, time=time.time())
            )

    def first_token(self, name: str, seconds: float) -> None:
        """`seconds`: since the client's request arrived."""
        if self._first_token is not None:
            self._first_token(FirstToken(id=name, seconds=seconds))

    def finished(
        self, spec: RequestSpec, reason: FinishReason, cached_tokens: int, completion_tokens: int, seconds: float
    ) -> None:
        """A request that was started has ended. `seconds`: since the client's request arrived."""
        if self._finished is not None:
            self._finished(
                RequestFinished(
                    id=spec.id,
                    reason=reason.value,
                    prompt_tokens=len(spec.tokens),
                    cached_tokens=cached_tokens,
                    completion_tokens=completion_tokens,
                    seconds=seconds,
                )
            )

    def refused(self, status: int, body: Mapping[str, Any]) -> None:
        """An HTTP response with this error body; statuses that report a failure of the server are no refusals."""
        if self._refused is not None and (status < 500 or status == 503):
            error = body["error"]
            self._refused(Refused(code=error["code"], what=error["param"], status=status, message=error["message"]))
