"""Who runs: the slots, and the pages that their requests hold.

Owns slots and leases; admitting and releasing happen here and nowhere else. Must not know policies or plans.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from srv.errors import IntegrityError
from srv.memory.cache import Cache, Lease
from srv.memory.radix import Match, Pages
from srv.sched.plan import Start
from srv.sched.request import Request, State
from srv.sched.sharing import find_leader, is_leading


class Roster:
    """Up to `slots` requests, RUNNING or ENDING, in order of arrival, over one cache."""

    def __init__(self, cache: Cache, slots: int) -> None:
        self.cache = cache
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))  # the lowest is taken first: requests lie close together
        self._ended_slots: list[int] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival. Iterate over a copy where requests are admitted or released meanwhile."""
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def match(self, request: Request) -> Match:
        """The cached prefix of a waiting request; the tree is asked again only when it has changed."""
        if request.match_version != self.cache.version:
            request.match = self.cache.match(request.namespace, request.start_tokens, request.prefix_limit)
            request.match_version = self.cache.version
        return request.match

    def is_held(self, request: Request) -> bool:
        """Whether a waiting request should go on waiting, for an earlier one that computes its prompt now."""
        if not self.cache.prefix_cache:
            return False
        if request.leader is None or not is_leading(request.leader):
            request.leader = find_leader(request, self._requests, self.match(request).pages, self.cache.page_size)
        return request.leader is not None

    def admit(self, request: Request) -> Start:
        """Give a waiting request a slot and a lease on its cached prefix."""
        lease = self.cache.open(request.namespace, request.start_tokens, request.prefix_limit)
        request.state, request.lease, request.slot = State.RUNNING, lease, self._free_slots.pop()
        request.computed = request.planned = lease.pages * self.cache.page_size
        request.pages_told = 0
        request.leader = None
        insort(self._requests, request, key=lambda one: one.arrival)
        return Start(request.slot, request.id, request.start_tokens, len(request.prompt), request.params)

    def extend(self, request: Request, tokens: int) -> Pages:
        """Pages for the first `tokens` positions; those that its runner's page tables do not have yet.

        In the first row of a start these are the cached prefix's pages, too.
        """
        told = request.pages_told
        if tokens <= told * self.cache.page_size:
            return self.cache.no_pages
        lease = lease_of(request)
        self.cache.extend(lease, tokens)
        request.pages_told = lease.pages
        return tuple(tuple(table[told:]) for table in lease.tables)

    def can_extend(self, request: Request, tokens: int) -> bool:
        if tokens <= request.pages_told * self.cache.page_size:
            return True  # it has them: most steps of most requests
        return self.cache.can_extend(lease_of(request), tokens)

    def publish(self, request: Request) -> None:
        """Once its start tokens are computed, let others share them."""
        if not request.published and request.computed >= len(request.start_tokens) and not request.tainted:
            self.cache.publish(lease_of(request), request.start_tokens)
            request.published = True

    def release(self, request: Request) -> None:
        """Take back slot and pages. Raises IntegrityError if that was done before, or while rows are in flight."""
        lease = lease_of(request)
        if request.in_flight:
            raise IntegrityError(f"request {request.id} was released with {request.in_flight} rows in flight")
        self.cache.close(lease, request.computed_tokens())
        self._requests.remove(request)
        insort(self._free_slots, request.slot, key=lambda slot: -slot)
        self._ended_slots.append(request.slot)
        request.state, request.lease, request.slot = State.RELEASED, None, -1

    def take_ended_slots(self) -> tuple[int, ...]:
        """Slots released since the last call."""
        ended = tuple(self._ended_slots)
        self._ended_slots.clear()
        return ended

    def check_integrity(self, deep: bool = False) -> None:
        """Raises IntegrityError, with the numbers, unless pages and slots add up."""
        self.cache.check_integrity(deep)
        slots = self._free_slots + [request.slot for request in self._requests]
        if sorted(slots) != list(range(self._slots)):
            raise IntegrityError(
                f"{len(self._free_slots)} free slots + {len(self._requests)} running requests"
                f" are not the {self._slots} slots once each"
            )
        leases = {id(lease_of(request)) for request in self._requests}
        if len(leases) != len(self._requests) or len(leases) != self.cache.open_leases:
            raise IntegrityError(f"{len(self._requests)} requests run on {self.cache.open_leases} leases")


def lease_of(request: Request) -> Lease:
    """The lease of a request on the roster. Raises IntegrityError for any other."""
    if request.lease is None:
        raise IntegrityError(f"request {request.id} holds no pages; it is {request.state.value}")
    return request.lease
