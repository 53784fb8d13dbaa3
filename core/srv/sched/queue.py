"""The waiting queue and the order in which it is served.

Owns the order of waiting requests. Must not know slots, pages or steps: the scheduler passes in functions that say
how much of a prefix is cached and which requests wait for a prompt that another request is computing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from srv.sched.fair_order import FairOrder
from srv.sched.request import Request
from srv.sched.shares import Shares

# A request that others with no smaller share have bypassed this often is not bypassed again: under "lpm" it is the
# next of its share whatever is cached, and while it waits for a prompt that another request is computing, all requests
# behind it wait as well.
MAX_TIMES_BYPASSED = 32
# Longer queues are served in order of arrival: matching every prompt would cost more than it saves (SGLang's value).
MAX_MATCHED_QUEUE = 128


class WaitingQueue:
    """Whoever holds the fewest slots first; among equals, first come, first served ("fcfs"), or longest prefix match
    first ("lpm").

    Among equals, retracted requests come first and are never bypassed. `cached_tokens(request)` returns the number of
    tokens of the request's prefix that are cached. `shares`: the slots that each client request and owner holds.
    """

    def __init__(self, policy: str, cached_tokens: Callable[[Request], int], shares: Shares | None = None) -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"scheduling policy {policy!r} is none of: fcfs, lpm")
        self._by_prefix = policy == "lpm"
        self._cached_tokens = cached_tokens
        self._shares = shares or Shares()
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._order = FairOrder(self._shares)
        self._bypassed: list[Request] = []  # by the request that `candidates` has returned last
        self._left_behind: list[Request] = []  # they must wait, and the walk in fair order has passed them

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def owners(self) -> int:
        """The number of owners with waiting requests."""
        return self._order.owners

    def not_started(self) -> int:
        """The number of client requests of which some sequences wait and none runs."""
        return len(self._order.not_started())

    def knows(self, request: Request) -> bool:
        """Whether other sequences of this client request wait or run."""
        return self._order.waits(request.claimant) or request.claimant in self._shares.groups

    def heads(self) -> Iterator[Request]:
        """The first waiting sequence of each client request that runs no sequence, about in order of arrival."""
        return (self._order.head(claimant) for claimant in tuple(self._order.not_started()))

    def push(self, request: Request) -> None:
        self._requests[request.id] = request
        self._order.push(request)

    def push_front(self, request: Request) -> None:
        self._requests[request.id] = request
        self._requests.move_to_end(request.id, last=False)
        self._order.push(request, first=True)

    def remove(self, request: Request) -> None:
        """Remove a request that was not chosen (it was aborted or finished)."""
        del self._requests[request.id]
        self._order.remove(request)

    def take(self, request: Request) -> None:
        """Remove the request that `candidates` has returned last and count one bypass for every request before it."""
        for other in self._bypassed:
            other.times_bypassed += 1
        self._bypassed = []
        self.remove(request)

    def candidates(self, must_wait: Callable[[Request], bool] = lambda request: False) -> Iterator[Request]:
        """The requests to admit, in order. The caller must `take` each one before it asks for the next, or stop.

        Requests for which `must_wait` is true are skipped, until they have been bypassed MAX_TIMES_BYPASSED times.
        """
        cached: dict[str, int] = {}
        if self._by_prefix and len(self._requests) <= MAX_MATCHED_QUEUE:
            cached = {request.id: self._cached_tokens(request) for request in self}
        self._order.restart()
        self._left_behind = []
        while self._requests:
            chosen = self._longest_match(cached, must_wait) if cached else self._first(must_wait)
            if chosen is None:
                return
            yield chosen

    def _first(self, must_wait: Callable[[Request], bool]) -> Request | None:
        """The first request in fair order that need not wait."""
        if any(_is_next(request) for request in self._left_behind):
            return None
        skipped: list[Request] = []
        for request in self._order.walk():
            if not must_wait(request):
                self._bypassed = self._left_behind + skipped
                self._left_behind += [request_ for request_ in skipped if request_.claimant != request.claimant]
                return request
            if _is_next(request):
                return None
            skipped.append(request)
        return None

    def _longest_match(self, cached: dict[str, int], must_wait: Callable[[Request], bool]) -> Request | None:
        """Of the requests with the smallest share, the one with the longest cached prefix."""
        waiting = list(self)
        shares = [self._shares.of(request) for request in waiting]
        order = sorted(
            range(len(waiting)),
            key=lambda place: (shares[place], not _is_next(waiting[place]), -cached[waiting[place].id], place),
        )
        for place in order:
            if not must_wait(waiting[place]):
                self._bypassed = [waiting[other] for other in range(place) if shares[other] <= shares[place]]
                return waiting[place]
            if _is_next(waiting[place]):
                return None
        return None


def _is_next(request: Request) -> bool:
    """Whether a request must not be bypassed by others with the same share."""
    return request.retractions > 0 or request.times_bypassed >= MAX_TIMES_BYPASSED
