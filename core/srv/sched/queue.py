"""The waiting queue and the order in which it is served.

Owns the order of waiting requests. Must not know slots, pages or steps: the scheduler passes in functions that say
how much of a prefix is cached and which requests wait for a prompt that another request is computing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from srv.sched.request import Request

# A request that others have bypassed this often is not bypassed again: under "lpm" it is next whatever is cached,
# and while it waits for a prompt that another request is computing, all requests behind it wait as well.
MAX_TIMES_BYPASSED = 32
# Longer queues are served in order of arrival: matching every prompt would cost more than it saves (SGLang's value).
MAX_MATCHED_QUEUE = 128


class WaitingQueue:
    """First come, first served ("fcfs"), or longest prefix match first ("lpm").

    Retracted requests return to the front and are never bypassed. `cached_tokens(request)` returns the number of
    pages of the request's prefix that are cached.
    """

    def __init__(self, policy: str, cached_tokens: Callable[[Request], int]) -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"scheduling policy {policy!r} is none of: fcfs, lpm")
        self._by_prefix = policy == "lpm"
        self._cached_tokens = cached_tokens
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        self._requests[request.id] = request

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._requests.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """Remove a request that was not chosen (it was aborted or finished)."""
        del self._requests[request.id]

    def take(self, request: Request) -> None:
        """Remove the chosen request and count one bypass for every request before it."""
        for other in self:
            if other is request:
                break
            other.times_bypassed += 1
        self.remove(request)

    def candidates(self, must_wait: Callable[[Request], bool] = lambda request: False) -> Iterator[Request]:
        """The requests to admit, in order. The caller must `take` each one before it asks for the next, or stop.

        Requests for which `must_wait` is true are skipped, until they have been bypassed MAX_TIMES_BYPASSED times.
        """
        order = iter(self._ranked())
        while self._requests:
            # Bypassing a request also bypasses every request before it, so the first one has been bypassed most often.
            first = next(iter(self))
            if first.retractions or first.times_bypassed >= MAX_TIMES_BYPASSED:
                chosen = None if must_wait(first) else first
            else:
                waiting = (request for request in order if request.id in self._requests)
                chosen = next((request for request in waiting if not must_wait(request)), None)
            if chosen is None:
                return
            yield chosen

    def _ranked(self) -> list[Request]:
        if not self._by_prefix or len(self._requests) > MAX_MATCHED_QUEUE:
            return list(self)
        return sorted(self, key=lambda request: -self._cached_tokens(request))
