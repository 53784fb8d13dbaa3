"""The errors with which the engine ends single requests, as exceptions. Must not know how they are reported."""

from __future__ import annotations

from srv.errors import RequestError

# Status by error code; all other codes are internal errors.
_STATUS = {
    "empty_prompt": 400,
    "invalid_token_id": 400,
    "context_length_exceeded": 400,
    "exceeds_pool": 400,
    "grammar_failed": 400,
    "duplicate_request": 409,
    "queue_full": 503,
    "shutting_down": 503,
}


def request_error(error: tuple[str, str] | None) -> RequestError:
    """The exception for the (code, message) of the last output of a request."""
    code, message = error or ("engine_error", "the engine failed on this request")
    return RequestError(message, code=code, status=_STATUS.get(code, 500))
