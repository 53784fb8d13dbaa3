"""What bounds the scheduler, and what it reports. Plain values; how they are chosen is not known here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one scheduler.

    max_running_requests: slots. max_queued_requests: None, or how many may wait before `add` refuses.
    chunked_prefill_size: prompt tokens a step at most, prompts are cut to fit; -1: prompts stay whole.
    max_prefill_tokens: prompt tokens a step at most while prompts stay whole; a longer one goes alone.
    context_length: prompt and output tokens of one request at most.
    conservativeness: scales how much of their remaining output running requests are expected to need.
    policy: "fcfs" (order of arrival) or "lpm" (longest cached prefix first).
    depth: steps in flight, 1 or 2. lookahead: positions that speculation may fill beyond a decode row.
    vocab_size: token ids are in [0, vocab_size); None: they are not looked at.
    """

    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    max_prefill_tokens: int
    page_size: int
    context_length: int
    conservativeness: float = 1.0
    policy: str = "fcfs"
    prefix_cache: bool = True
    depth: int = 1
    lookahead: int = 0
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Pages are summed over cache groups; counters run since start.

    prompt_tokens and cached_tokens count each request once, when it is first admitted. `finished` counts
    requests that ended in any way but by abort; requests that `add` refused are in no count.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    retractions: int
    finished: int
    aborted: int
