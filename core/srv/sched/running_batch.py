"""The running batch: the requests that hold slots, and the leases on their pages.

Owns slots and leases: requests are admitted and released only here. Must not know policies or plans.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator

from srv.errors import IntegrityError
from srv.memory.cache import Cache, Lease
from srv.memory.radix import Match, Pages
from srv.sched.plan import Start
from srv.sched.request import NEVER, Request, State
from srv.sched.shares import Shares
from srv.sched.sharing import find_prefix_producer, is_prefix_producer


class RunningBatch:
    """Up to `slots` requests, RUNNING or ENDING, in order of arrival. They share one cache.

    `shares`: who holds how many of the slots. `save_interval`: output tokens between two places where recurrent states
    are saved.
    """

    def __init__(self, cache: Cache, slots: int, save_interval: int = NEVER) -> None:
        self._save_interval = save_interval
        self.cache = cache
        self.shares = Shares()
        self._slots = slots
        self._free_slots = list(range(slots - 1, -1, -1))  # the lowest is taken first, which keeps slots adjacent
        self._ended_slots: list[int] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival. Iterate over a copy if the loop admits or releases requests."""
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def match(self, request: Request) -> Match:
        """The cached prefix of a waiting request, looked up again only when the tree has changed."""
        if request.match is None or request.match_version != self.cache.version:
            request.match = self.cache.match(request.spec.namespace, request.start_tokens, request.prefix_limit)
            request.match_version = self.cache.version
        return request.match

    def must_wait(self, request: Request) -> bool:
        """Whether a waiting request should go on waiting because an earlier one is computing the same prompt."""
        if not self.cache.prefix_cache:
            return False
        if request.prefix_producer is None or not is_prefix_producer(request.prefix_producer):
            cached = self.match(request).tokens
            unit, saves = self.cache.unit, self.cache.saves_states
            request.prefix_producer = find_prefix_producer(request, self._requests, cached, unit, saves)
        return request.prefix_producer is not None

    def admit(self, request: Request) -> Start:
        """Give a waiting request a slot and a lease on its cached prefix."""
        lease = self.cache.open(request.spec.namespace, request.start_tokens, request.prefix_limit)
        request.state, request.lease, request.slot = State.RUNNING, lease, self._free_slots.pop()
        request.confirmed = request.bound = lease.capacity
        if request.scheduled_at is None:  # not after a retraction
            request.scheduled_at = time.perf_counter()
        request.capacity = 0
        request.pages_sent = (0,) * len(lease.tables)
        request.prefix_producer = None
        if self.cache.saves_states:
            request.saved_positions = self.cache.places_to_save(lease, request.start_tokens)
            request.next_saved_position = self._next_saved(request, lease.capacity)
        insort(self._requests, request, key=lambda one: one.arrival)
        self.shares.admitted(request)
        return Start(request.slot, request.spec, tuple(request.output), lease.restored)

    def _next_saved(self, request: Request, position: int) -> int:
        """The next position, after this one, at which the recurrent states of a request are saved."""
        for saved_position in request.saved_positions:
            if saved_position > position:
                return saved_position
        begin = max(position, len(request.start_tokens) - 1)
        unit = self.cache.unit
        return NEVER if self._save_interval == NEVER else -(-(begin + self._save_interval) // unit) * unit

    def save(self, request: Request, position: int) -> int:
        """The slot to which the row that ends at `next_saved_position` saves the recurrent states; 0: none is free."""
        request.next_saved_position = self._next_saved(request, position)
        return self.cache.save(lease_of(request), position, len(request.start_tokens))

    def extend(self, request: Request, tokens: int) -> Pages:
        """Allocate pages for the first `tokens` positions; returns the pages that the runner does not have yet.

        For the first row after a Start, these include the pages of the cached prefix.
        """
        if tokens <= request.capacity:
            return self.cache.no_pages
        lease = lease_of(request)
        self.cache.extend(lease, tokens)
        new = tuple([tuple(table[sent:]) for table, sent in zip(lease.tables, request.pages_sent, strict=True)])
        request.capacity = lease.capacity
        request.pages_sent = tuple([len(table) for table in lease.tables])
        return new

    def can_extend(self, request: Request, tokens: int) -> bool:
        if tokens <= request.capacity:
            return True  # fast path: the last page still has room, as in most decode steps
        return self.cache.can_extend(lease_of(request), tokens)

    def trim(self, request: Request) -> None:
        """Give back the pages behind the windows of a request's next tokens; those of its prompt are shared first."""
        lease = lease_of(request)
        if not request.published and not request.kv_invalid:
            self.cache.publish(lease, request.start_tokens[: request.confirmed])
        self.cache.trim(lease, request.confirmed)

    def publish(self, request: Request) -> None:
        """Share the pages of the start tokens with other requests once all of them are computed."""
        if not request.published and request.confirmed >= len(request.start_tokens) and not request.kv_invalid:
            self.cache.publish(lease_of(request), request.start_tokens)
            request.published = True
            request.decodes_only = request.next_vector_position is None

    def release(self, request: Request) -> None:
        """Take back slot and pages. Raises IntegrityError if the request holds none or has rows in flight."""
        lease = lease_of(request)
        if request.in_flight:
            raise IntegrityError(f"request {request.id} was released with {request.in_flight} rows in flight")
        self.cache.close(lease, request.computed_tokens())
        self._requests.remove(request)
        self.shares.released(request)
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
                f"{len(self._free_slots)} free slots and {len(self._requests)} running requests"
                f" do not account for each of the {self._slots} slots exactly once"
            )
        if self.shares.total != len(self._requests):
            raise IntegrityError(
                f"{len(self._requests)} running requests hold {self.shares.total} slots by the counts of shares"
            )
        leases = {id(lease_of(request)) for request in self._requests}
        if len(leases) != len(self._requests) or len(leases) != self.cache.open_leases:
            raise IntegrityError(f"{len(self._requests)} running requests have {self.cache.open_leases} open leases")
        for request in self._requests:
            for group, trimmed in zip(self.cache.groups, lease_of(request).trimmed, strict=True):
                if trimmed > group.first_needed_page(request.confirmed):
                    raise IntegrityError(
                        f"request {request.id} gave back {trimmed} pages, but steps in flight may read them:"
                        f" {request.confirmed} tokens are confirmed, the window is {group.window}"
                    )


def lease_of(request: Request) -> Lease:
    """The lease of a request in the running batch. Raises IntegrityError for any other request."""
    if request.lease is None:
        raise IntegrityError(f"request {request.id} holds no pages; it is {request.state.value}")
    return request.lease
