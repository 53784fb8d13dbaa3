"""Requests that wait, and who is next.

Owns the order of waiting. Must not know slots, pages or steps; how well a prefix is cached, and who should wait
for another's prompt, are asked of functions given by the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from srv.sched.request import Request

# A request that this many others went past is passed by nobody any more: under "lpm" it goes next, whatever is
# cached, and if it waits for a prompt that another computes, all behind it wait with it.
MAX_OVERTAKEN = 32
# Longer queues are served in order of arrival: matching each prompt would cost more than it brings (SGLang's figure).
LONGEST_MATCHED_QUEUE = 128


class WaitingQueue:
    """First come, first served, or longest cached prefix first ("lpm").

    Retracted requests come back at the front and are never overtaken. `cached(request)` gives the number
    of pages of its prefix that are cached.
    """

    def __init__(self, policy: str, cached: Callable[[Request], int]) -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"scheduling policy {policy!r} is none of: fcfs, lpm")
        self._by_prefix = policy == "lpm"
        self._cached = cached
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
        """Out of the queue without having been chosen."""
        del self._requests[request.id]

    def take(self, request: Request) -> None:
        """Out of the queue by being chosen: every request before it was overtaken once more."""
        for other in self:
            if other is request:
                break
            other.overtaken += 1
        self.remove(request)

    def candidates(self, held: Callable[[Request], bool] = lambda request: False) -> Iterator[Request]:
        """Who is next, one after the other. The caller takes each one, or stops.

        Requests that are `held` are passed over, so often as requests may be overtaken.
        """
        order = iter(self._ranked())
        while self._requests:
            # Whoever goes past a request also goes past all before it, so the first one is overtaken most.
            first = next(iter(self))
            if first.retractions or first.overtaken >= MAX_OVERTAKEN:
                chosen = None if held(first) else first
            else:
                waiting = (request for request in order if request.id in self._requests)
                chosen = next((request for request in waiting if not held(request)), None)
            if chosen is None:
                return
            yield chosen

    def _ranked(self) -> list[Request]:
        if not self._by_prefix or len(self._requests) > LONGEST_MATCHED_QUEUE:
            return list(self)
        return sorted(self, key=lambda request: -self._cached(request))
