"""Who should wait because a running request is computing its prompt right now.

Owns that judgement. Must not know slots, the order of the queue, or how pages are held.

A prompt's pages can be shared once it is computed and published. A request that arrives meanwhile with the
same prompt (each of `n` outputs is such a request) would compute it again; it is cheaper to let it wait for the
leader, the earlier running request that is at it, and then take the leader's pages. It waits for nothing but
that: once the leader has published, yielded, failed or ended, the follower is a request like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from srv.sched.request import Request, State

# Waiting must spare at least this share (one half) of what the follower would else compute: a few common first
# tokens, as of a chat template, are computed twice rather than waited for.
LEAST_SPARED = 2


def is_leading(request: Request) -> bool:
    """Whether a request is computing a prompt that will be published when it is done."""
    return request.state is State.RUNNING and not request.published and not request.tainted


def find_leader(request: Request, running: Iterable[Request], cached_pages: int, page_size: int) -> Request | None:
    """The earlier running request to wait for, or None if `request` should compute its prompt itself.

    `cached_pages` of its prefix are cached already.
    """
    cached = cached_pages * page_size
    limit = request.prefix_limit // page_size * page_size  # tokens of the full pages that it may take from others
    needed = max(cached + 1, cached + -(-(len(request.start_tokens) - cached) // LEAST_SPARED))
    best: Request | None = None
    for other in running:
        if other.arrival >= request.arrival or other.namespace != request.namespace or not is_leading(other):
            continue
        whole = min(limit, len(other.start_tokens) // page_size * page_size)
        common = common_prefix(request.start_tokens, other.start_tokens, whole) // page_size * page_size
        if common >= needed:
            best, needed = other, common + 1
    return best


def common_prefix(one: tuple[int, ...], other: tuple[int, ...], limit: int) -> int:
    """Leading tokens, of the first `limit`, in which two sequences agree: halving, no token loop."""
    limit = min(limit, len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit  # tokens before `low` agree, some token before `high` differs
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
