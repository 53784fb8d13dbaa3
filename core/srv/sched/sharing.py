"""In-flight prefix deduplication: which waiting request should wait for a prompt that is being computed.

Owns that decision. Must not know slots, the order of the queue, or how pages are held.

The pages of a prompt can be shared once they are computed and published. A request with the same prompt that
arrives before that (as each of the `n` outputs of one API request does) would compute the prompt a second time. It
is cheaper to let it wait for its prefix producer, the earlier running request that is computing the prompt, and then
to reuse the producer's pages. As soon as the producer has published its prompt, was retracted, failed or ended, the
waiting request is scheduled like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from srv.sched.request import Request, State

# Waiting must save at least 1 / MIN_SAVED_DIVISOR of the tokens that the request would otherwise compute. A short
# common prefix, such as that of a chat template, is computed twice instead.
MIN_SAVED_DIVISOR = 2


def is_prefix_producer(request: Request) -> bool:
    """Whether a request is computing a prompt that will be published."""
    return request.state is State.RUNNING and not request.published and not request.kv_invalid


def find_prefix_producer(
    request: Request, running: Iterable[Request], cached: int, unit: int, saves_states: bool = False
) -> Request | None:
    """The earlier running request to wait for, or None if `request` should compute its prompt itself.

    `cached`: tokens of its prefix that are already cached. Prefixes are shared in units of `unit` tokens; with
    `saves_states`, only where the earlier request saves its recurrent states.
    """
    limit = request.prefix_limit // unit * unit  # tokens that it may share
    needed = max(cached + 1, cached + -(-(len(request.start_tokens) - cached) // MIN_SAVED_DIVISOR))
    best: Request | None = None
    for other in running:
        if other.arrival >= request.arrival or not is_prefix_producer(other):
            continue
        if other.spec.namespace != request.spec.namespace:
            continue
        most = min(limit, len(other.start_tokens) // unit * unit)
        common = common_prefix_length(request.start_tokens, other.start_tokens, most) // unit * unit
        if saves_states:
            common = max((position for position in other.saved_positions if position <= common), default=0)
        if common >= needed:
            best, needed = other, common + 1
    return best


def common_prefix_length(first: tuple[int, ...], second: tuple[int, ...], limit: int) -> int:
    """Length of the common prefix of two sequences, at most `limit`. Bisects with slice comparisons, no token loop."""
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    low, high = 0, limit  # tokens before `low` are equal; some token before `high` differs
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
