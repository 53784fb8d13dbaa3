"""How much of their remaining output requests are expected to need: the reserve kept at admission.

Owns the expected share and how it moves. Must not know pages or requests.

The scheme and its constants are SGLang's `new_token_ratio` (0.5.2): most requests end long before
`max_tokens`, so only a share of it is reserved; the share starts high, decays while decoding goes well, and
jumps up when pages ran out after all.
"""

from __future__ import annotations

import math

INITIAL_SHARE = 0.7  # of the remaining output, times the conservativeness
LEAST_SHARE = 0.14  # of the initial share
DECAY_STEPS = 600  # decode steps from the initial to the least share
OUTPUT_CLIP = 4096  # no request is expected to bring more further tokens than this
STEPS_AFTER_RETRACTION = 20  # decode steps that should pass before the next retraction


class OutputReserve:
    """The expected share of remaining output, in (0, 1]."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_SHARE * conservativeness, 1.0)
        self._least = self._initial * LEAST_SHARE
        self.share = self._initial

    def expect(self, remaining: int) -> int:
        """Tokens that a request is expected to bring yet, of `remaining` that it may."""
        return math.ceil(self.share * min(remaining, OUTPUT_CLIP))

    def decay(self) -> None:
        """One step with decode rows went well."""
        self.share = max(self._least, self.share - (self._initial - self._least) / DECAY_STEPS)

    def reset(self) -> None:
        """Nothing runs any more: what was learnt is of no use to the next requests."""
        self.share = self._initial

    def retracted(self, generated: int, allowed: int, requests: int) -> None:
        """Pages ran out while `requests` running ones had `generated` of their `allowed` output tokens."""
        seen = (generated + STEPS_AFTER_RETRACTION * requests) / (allowed + 1)
        self.share = max(self.share, min(seen, 1.0))
