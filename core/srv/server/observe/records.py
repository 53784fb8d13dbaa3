"""What the API process knows of each sequence when it has ended: when it waited, computed and generated, and for whom.

Owns the record of one sequence and the caller of one HTTP request, whom the middleware of `srv.server.http.observing`
sets for the handlers that it calls. Must not know what becomes of a record (metrics, logs, traces).

All times are those of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from srv.types import FinishReason, RequestSpec, SamplingParams


@dataclass(slots=True, eq=False)
class RecordedCaller:
    """Who sent an HTTP request. `labels`: values of the custom metric labels, in the order of their names.

    `trace`: the headers of the caller's trace context. `records`: of the request's sequences, once they have ended.
    `failed`: its stream ended with an error.
    """

    path: str
    labels: tuple[str, ...] = ()
    trace: dict[str, str] = field(default_factory=dict)
    records: list[SequenceRecord] = field(default_factory=list)
    failed: bool = False


# Set only while an HTTP request is handled, and only if an argument asks for what it carries.
CALLER: ContextVar[RecordedCaller | None] = ContextVar("caller", default=None)


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """One sequence. A time is None if the sequence did not come that far.

    `arrival`: of the client's request. `scheduled`: when the scheduler gave it a slot. `outputs`: sequences of its
    prompt, among which it has the number `output_index`. `texts`: the parts of its output
    if the request log shows them, else None.
    """

    id: str
    arrival: float
    caller: RecordedCaller | None = None
    spec: RequestSpec | None = None
    scheduled: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    reason: FinishReason = FinishReason.ABORT
    cached_tokens: int = 0
    completion_tokens: int = 0
    outputs: int = 1
    output_index: int = 0
    texts: list[str] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return self.caller.labels if self.caller is not None else ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.tokens) if self.spec is not None else 0

    @property
    def max_tokens(self) -> int | None:
        """None for an embedding."""
        if self.spec is None or not isinstance(self.spec.params, SamplingParams):
            return None
        return self.spec.params.max_tokens

    def stages(self) -> dict[str, tuple[float, float]]:
        """Begin and end of each stage that it reached: queue, prefill, decode."""
        stages: dict[str, tuple[float, float]] = {}
        if self.scheduled is None:
            return stages
        stages["queue"] = (self.arrival, self.scheduled)
        if self.first_token is not None:
            stages["prefill"] = (self.scheduled, self.first_token)
            stages["decode"] = (self.first_token, self.ended)
        return stages
