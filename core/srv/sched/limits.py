"""Limits of the scheduler and the statistics that it reports. Must not know how the limits are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from srv.memory.groups import most_unconfirmed


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one scheduler.

    max_running_requests: number of slots. max_queued_requests: how many client requests may wait, none of their
    sequences running, before `add` refuses another one; None: no limit.
    chunked_prefill_size: maximum prompt tokens per step; prompts are split to fit. -1: prompts are not split.
    max_prefill_tokens: maximum prompt tokens per step when prompts are not split; a longer prompt runs alone.
    context_length: maximum prompt and output tokens of one request.
    conservativeness: scales the share of the remaining output that is reserved for running requests.
    policy: "fcfs" (first come, first served) or "lpm" (longest prefix match first).
    depth: maximum steps in flight, 1 or 2.
    drafts: maximum draft tokens per decode row (speculative decoding); 0: none.
    step_seconds: (tokens, seconds) of decode steps, ascending in tokens, to find out whether drafts and jumps pay; ():
    they do.
    device_lengths: attention takes KV lengths from the device. If not, a request whose last row had drafts waits for
    the result of that row, because the host does not know yet how many drafts were accepted.
    save_interval: output tokens between two places where recurrent states are saved for the prefix cache.
    vocab_size: token ids must be in [0, vocab_size); None: token ids are not checked.
    """

    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    max_prefill_tokens: int
    context_length: int
    conservativeness: float = 1.0
    policy: str = "fcfs"
    prefix_cache: bool = True
    depth: int = 1
    drafts: int = 0
    step_seconds: tuple[tuple[int, float], ...] = ()
    device_lengths: bool = True
    vocab_size: int | None = None
    save_interval: int = 256

    @property
    def most_unconfirmed(self) -> int:
        """The most tokens of one request whose steps can be in flight."""
        return most_unconfirmed(self.depth, self.chunked_prefill_size, self.drafts, self.context_length)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Page counts are summed over cache groups; counters run since start.

    state_slots_total: the slots for recurrent states of prefixes, of which state_slots_cached are in the prefix cache,
    and state_slots_held are with running requests.

    prompt_tokens and cached_tokens count each request once, when it is first admitted. drafts_proposed: draft tokens
    that were verified, of which drafts_accepted were right. `finished` counts
    requests that ended for any reason except abort; requests that `add` refused are not counted anywhere.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    state_slots_total: int
    state_slots_cached: int
    state_slots_held: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafts_proposed: int
    drafts_accepted: int
    steps: int
    retractions: int
    finished: int
    aborted: int
