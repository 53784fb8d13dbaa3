"""Regular expressions of decimal numbers without exponents, up to a bound of any size. Must not know schemas.

A number is between two bounds if it matches the pattern of each.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from srv.grammar.integer_ranges import MOST_LISTED, integer_pattern

ANY_FRACTION = r"(\.[0-9]+)?"
_POSITIVE = r"[0-9]*[1-9][0-9]*"  # digits that are not all 0


# Decimal's own minus rounds to 28 digits, `copy_negate` does not.
def at_least(low: Decimal, *, above: bool = False) -> str:
    """The numbers from `low`, or above it."""
    if low < 0:
        return _either(
            _magnitudes(Decimal(0), None), "-" + _magnitudes(Decimal(0), low.copy_negate(), without_high=above)
        )
    return _magnitudes(low, None, without_low=above)


def at_most(high: Decimal, *, below: bool = False) -> str:
    """The numbers up to `high`, or below it."""
    if high < 0 or (high == 0 and below):
        return "-" + _magnitudes(high.copy_negate(), None, without_low=below)
    return _either("-" + _magnitudes(Decimal(0), None), _magnitudes(Decimal(0), high, without_high=below))


def decimal_multiples_pattern(divisor: Decimal, low: Decimal, high: Decimal) -> str | None:
    """The multiples of a divisor from `low` to `high`; None if they are many or there is none."""
    step = Fraction(divisor)
    first, last = ceil(Fraction(low) / step), floor(Fraction(high) / step)
    if not 0 <= last - first < MOST_LISTED:
        return None
    places = len(f"{divisor:f}".partition(".")[2])
    unit = int(step * 10**places)
    return _either(*(_written(unit * multiple, places) for multiple in range(first, last + 1)))


def _written(units: int, places: int) -> str:
    """Units of 10^-places, with any zeros behind them."""
    whole, rest = divmod(abs(units), 10**places)
    digits = f"{rest:0{places}d}".rstrip("0") if rest else ""
    return f"{'-' if units < 0 else ''}{whole}{_below('', strictly=False) if not digits else rf'[.]{digits}0*'}"


def _magnitudes(low: Decimal, high: Decimal | None, *, without_low: bool = False, without_high: bool = False) -> str:
    """Numbers without a sign. `low` is 0 or `high` is None."""
    if high is None:
        whole, digits = _parts(low)
        if not digits and not without_low:
            return integer_pattern(whole, None) + ANY_FRACTION
        return _either(integer_pattern(whole + 1, None) + ANY_FRACTION, f"{whole}{_above(digits, without_low)}")
    whole, digits = _parts(high)
    parts = [integer_pattern(0, whole - 1) + ANY_FRACTION] if whole else []
    if digits or not without_high:
        parts.append(f"{whole}{_below(digits, without_high)}")
    return _either(*parts)


def _parts(number: Decimal) -> tuple[int, str]:
    """The integer and the digits after the point of a number that is not negative."""
    return floor(number), f"{number:f}".partition(".")[2].rstrip("0")


def _above(digits: str, strictly: bool) -> str:
    """Fractions from .digits, of which the last is not 0."""
    if not digits:
        return rf"\.{_POSITIVE}" if strictly else ANY_FRACTION
    parts = [f"{digits[:at]}[{int(digit) + 1}-9][0-9]*" for at, digit in enumerate(digits) if digit != "9"]
    return rf"\.{_either(*parts, digits + (_POSITIVE if strictly else '[0-9]*'))}"


def _below(digits: str, strictly: bool) -> str:
    """Fractions up to .digits, of which the last is not 0, or none."""
    if not digits:
        return r"(\.0+)?"
    parts = [f"{digits[:at]}[0-{int(digit) - 1}][0-9]*" for at, digit in enumerate(digits) if digit != "0"]
    parts += [digits[:at] for at in range(1, len(digits))]
    parts += [] if strictly else [f"{digits}0*"]
    return rf"(\.{_either(*parts)})?"


def _either(*patterns: str) -> str:
    return f"({'|'.join(patterns)})"
