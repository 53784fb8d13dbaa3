"""Bucket bounds of the histograms: the defaults, and the rules by which arguments set them.

Must not know any metric.
"""

from __future__ import annotations

from collections.abc import Sequence

TTFT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 160, 640, 2560)
INTER_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 8)
REQUEST = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 960, 1920, 7680)
TOKENS = (100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 10000, 20000, 40000, 80000, 200000, 1100000)
OUTPUTS = (1, 2, 5, 10, 20)


def one_two_five(maximum: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... up to `maximum`; at least 1."""
    bounds = [digit * 10**power for power in range(len(str(max(1, maximum)))) for digit in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= max(1, maximum))


def token_buckets(rule: Sequence[str] | None) -> tuple[float, ...]:
    """The bounds of a rule that `srv.args.checks.bucket_rule` accepts; None: those of the rule "default".

    tse MIDDLE BASE COUNT: MIDDLE, and COUNT bounds on either side of it at distances BASE^1 ... BASE^COUNT.
    """
    if not rule or rule[0] == "default":
        return tuple(map(float, TOKENS))
    numbers = [float(word) for word in rule[1:]]
    if rule[0] == "tse":
        middle, base, count = numbers
        distances = [base**power for power in range(1, int(count) + 1)]
        numbers = [
            middle,
            *(middle + distance for distance in distances),
            *(middle - distance for distance in distances),
        ]
    return tuple(sorted({number for number in numbers if number >= 0}))
