"""Regular expressions of the decimal integers in a range of any size. Must not know schemas or grammars."""

from __future__ import annotations

from itertools import pairwise


def integer_pattern(low: int | None, high: int | None) -> str:
    """The integers from `low` to `high`, both included; None: without an end. The range is not empty."""
    parts: list[str] = []
    if low is None or low < 0:
        smallest, largest = (1 if high is None or high >= 0 else -high), (None if low is None else -low)
        parts += [f"-{natural}" for natural in _naturals(smallest, largest)]
    if high is None or high >= 0:
        parts += _naturals(0 if low is None else max(low, 0), high)
    return f"({'|'.join(parts)})"


def _naturals(low: int, high: int | None) -> list[str]:
    """Patterns of the numbers from `low` up, which is not negative."""
    if high is None:
        digits = len(str(low))
        return [*_naturals(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    lengths = range(len(str(low)), len(str(high)) + 1)
    borders = [low, *(10**digits for digits in lengths[:-1]), high + 1]
    return [part for begin, end in pairwise(borders) for part in _same_length(str(begin), str(end - 1))]


def _same_length(low: str, high: str) -> list[str]:
    """Patterns of the numbers between two of the same length."""
    if not low:
        return [""]
    rest = len(low) - 1
    if low[0] == high[0]:
        return [low[0] + part for part in _same_length(low[1:], high[1:])]
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        parts += [low[0] + part for part in _same_length(low[1:], "9" * rest)]
        first += 1
    end: list[str] = []
    if high[1:] != "9" * rest:
        end = [high[0] + part for part in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return parts + end


MOST_LISTED = 1000  # multiples, or endings of them, in one pattern


def multiples_pattern(divisor: int, low: int | None, high: int | None) -> str | None:
    """The multiples of a divisor: those between `low` and `high` if they are few, else all; None without a pattern."""
    if low is not None and high is not None and (high // divisor + -low // divisor) < MOST_LISTED:
        return f"({'|'.join(str(divisor * times) for times in range(-(-low // divisor), high // divisor + 1))})"
    zeros = 0
    while divisor % 10 == 0:
        divisor, zeros = divisor // 10, zeros + 1
    digits = next((count for count in range(4) if 10**count % divisor == 0), None)
    if digits is None:
        return None
    endings = [f"{ending:0{digits}d}" for ending in range(0, 10**digits, divisor)] if digits else [""]
    end = f"({'|'.join(endings)})" + "0" * zeros
    small = [str(ending) for ending in range(0, 10**digits, divisor) if ending]  # shorter than `digits`
    parts = ["0", f"[1-9][0-9]*{end}", *(f"{multiple}{'0' * zeros}" for multiple in small)]
    return f"-?({'|'.join(parts)})"
