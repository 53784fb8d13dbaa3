"""The seeds of the outputs of one prompt. Must not know requests."""

from __future__ import annotations

import hashlib


def seeds_for(seed: int, n: int) -> tuple[int, ...]:
    """One seed per sequence, in [0, 2**63), derived from (seed, index). The first is `seed` unless it is negative."""
    derived = (
        int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "big") >> 1
        for index in range(0 if seed < 0 else 1, n)
    )
    return tuple(derived) if seed < 0 else (seed, *derived)
