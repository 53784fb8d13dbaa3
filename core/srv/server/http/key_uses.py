"""What each key of `--api-keys-file` with limits has used: requests per minute, and requests at the same time.

Requests of clients and lines of their batches count alike. Must not know HTTP or batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from srv.server.http.client_keys import ClientKey

BURST_SECONDS = 10.0  # an idle key may send what it may send in this time at once
MIN_BURST = 1.0


class KeyUse:
    """What one key has used. The bucket is refilled evenly. Call `leave` for each request that was counted."""

    def __init__(self, limits: ClientKey) -> None:
        self.limits = limits
        self.running = 0
        self._rate = (limits.requests_per_minute or 0) / 60
        self._capacity = max(MIN_BURST, self._rate * BURST_SECONDS)
        self._left, self._at = self._capacity, time.monotonic()

    def refusal(self) -> tuple[str, int] | None:
        """Why one more request is refused now, with the seconds to wait; None if it is counted."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            return f"it has {self.running} running requests, which is its limit", 1
        if self._rate:
            now = time.monotonic()
            self._left = min(self._capacity, self._left + (now - self._at) * self._rate)
            self._at = now
            if self._left < 1:
                wait = math.ceil((1 - self._left) / self._rate)
                return f"it may send {self.limits.requests_per_minute} requests per minute", wait
            self._left -= 1
        self.running += 1
        return None

    def leave(self) -> None:
        self.running -= 1


class KeyUses:
    """Those of all keys of a server."""

    def __init__(self, keys: Sequence[ClientKey] = ()) -> None:
        self._uses = {key: KeyUse(key) for key in keys}

    def of(self, client: ClientKey | None) -> KeyUse | None:
        """None for a caller without a line in the file, who is not limited."""
        return None if client is None else self._uses.get(client)
