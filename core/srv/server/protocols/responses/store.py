"""The responses of `/v1/responses` that clients may continue or read again, in memory.

Bounded by number and by size. The least recently used of the API key that has most are dropped first, so that a client
cannot displace what others have stored, and all of them when the server ends. Each belongs to the key that made it.
Must not know the content of a response.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 1024 * 1024
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A complete response. `items`: the whole conversation up to its request, without its output."""

    response: Mapping[str, Any]
    items: Sequence[Item]

    @property
    def conversation(self) -> list[Item]:
        """All items, those of the output last."""
        output: list[Item] = self.response["output"]
        return [*self.items, *output]


class ResponseStore:
    """Stored responses by owner and id. `owner`: as in `RequestSpec`."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        # The items by owner and id, each by the responses whose conversations have it, the one stored last at the end.
        self._items: dict[tuple[str, str], dict[str, Item]] = {}
        self.bytes = 0
        self._counts: Counter[str] = Counter()  # responses by owner
        self._sizes: Counter[str] = Counter()  # bytes by owner

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, unless it alone is larger than the store."""
        size = len(msgspec.json.encode((stored.response, stored.items)))
        if size > self._max_bytes:
            return
        response = stored.response["id"]
        self._stored[owner, response] = (stored, size)
        for item in stored.conversation:
            if (name := item.get("id")) is not None:
                self._items.setdefault((owner, name), {})[response] = item
        self._count(owner, 1, size)
        while len(self._stored) > self._max_responses:
            self._drop_of(self._counts)
        while self.bytes > self._max_bytes:
            self._drop_of(self._sizes)

    def _count(self, owner: str, responses: int, size: int) -> None:
        self.bytes += size
        for counter, change in ((self._counts, responses), (self._sizes, size)):
            counter[owner] += change
            if not counter[owner]:
                del counter[owner]

    def _drop_of(self, counter: Counter[str]) -> None:
        """Drop the least recently used response of the owner who has most."""
        owner = max(counter, key=counter.__getitem__)
        self.delete(*next(place for place in self._stored if place[0] == owner))

    def get(self, owner: str, name: str) -> StoredResponse | None:
        if (owner, name) not in self._stored:
            return None
        self._stored.move_to_end((owner, name))
        return self._stored[owner, name][0]

    def delete(self, owner: str, name: str) -> bool:
        """Whether there was one."""
        entry = self._stored.pop((owner, name), None)
        if entry is None:
            return False
        stored, size = entry
        self._count(owner, -1, -size)
        for item in stored.conversation:
            place = (owner, item.get("id", ""))
            holders = self._items.get(place, {})
            if holders.pop(name, None) is not None and not holders:
                del self._items[place]
        return True

    def item(self, owner: str, name: str) -> Item | None:
        """The item with this id in the response of this owner that was stored last of those that have it."""
        holders = self._items.get((owner, name))
        return None if holders is None else next(reversed(holders.values()))
