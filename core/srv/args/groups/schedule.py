"""Arguments that shape the steps: how many requests, how many tokens, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from srv.args.checks import above, at_least, at_least_or
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArgs:
    """What the scheduler may put into one step."""

    max_running_requests: Annotated[int, Arg("Most requests that run at once.", at_least(1), unit="requests")] = 256
    max_queued_requests: Annotated[
        int, Arg("Most requests that wait; one more is refused with status 503.", at_least(1), unit="requests")
    ] = 4096
    chunked_prefill_size: Annotated[
        int,
        Arg(
            "Most prompt tokens in one step; a longer prompt takes several steps.",
            at_least_or(1, -1, "never cut a prompt"),
            unit="tokens",
        ),
    ] = 2048
    max_prefill_tokens: Annotated[
        int,
        Arg(
            "Most prompt tokens in one step while prompts are not cut; a longer prompt runs alone.",
            at_least(1),
            unit="tokens",
        ),
    ] = 16384
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Arg("Order of waiting requests: first come first served, or longest cached prefix first."),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        Arg(
            "Factor on the output that is expected of running requests; more means fewer retractions.",
            above(0),
            metavar="FACTOR",
        ),
    ] = 1.0
    disable_overlap_schedule: Annotated[bool, Arg("Plan a step only when the one before has ended.")] = False
