"""How many output tokens a request is expected to need: the page reserve kept at admission.

Owns the expected ratio and how it changes. Must not know pages or requests.

The scheme and its constants are SGLang's `new_token_ratio` (0.5.2): most requests end long before
`max_tokens`, so only a fraction of their remaining output is reserved. The ratio starts high, decays with every
decode step, and is raised again when pages run out and a request is retracted.
"""

from __future__ import annotations

import math

INITIAL_RATIO = 0.7  # of the remaining output, before the conservativeness is applied
MIN_RATIO_FACTOR = 0.14  # minimum ratio, as a fraction of the initial one
DECAY_STEPS = 600  # decode steps from the initial to the minimum ratio
MAX_EXPECTED_TOKENS = 4096  # upper bound of the expected output per request
STEPS_AFTER_RETRACTION = 20  # decode steps that should pass before the next retraction


class OutputReserve:
    """Estimates remaining output. `ratio`, in (0, 1], is the expected fraction of the tokens that may still come."""

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._min = self._initial * MIN_RATIO_FACTOR
        self.ratio = self._initial

    def expected_tokens(self, remaining: int) -> int:
        """Output tokens that a request is expected to generate out of the `remaining` that it is allowed to."""
        return math.ceil(self.ratio * min(remaining, MAX_EXPECTED_TOKENS))

    def decay(self) -> None:
        """Lower the ratio by one decode step."""
        self.ratio = max(self._min, self.ratio - (self._initial - self._min) / DECAY_STEPS)

    def reset(self) -> None:
        """Return to the initial ratio: when no request is running, past output lengths say nothing about new ones."""
        self.ratio = self._initial

    def raise_after_retraction(self, generated: int, allowed: int, requests: int) -> None:
        """Pages ran out when `requests` running requests had generated `generated` of their `allowed` tokens."""
        observed = (generated + STEPS_AFTER_RETRACTION * requests) / (allowed + 1)
        self.ratio = max(self.ratio, min(observed, 1.0))
