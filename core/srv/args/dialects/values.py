"""Parse units, negations and JSON of single texts: pure functions that return None for an invalid text."""

from __future__ import annotations

import json
import re
from decimal import ROUND_DOWN, Decimal, InvalidOperation
from typing import Any

from srv.args.dialects.words import FALSE, TRUE

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_SIZE = re.compile(r"(?P<number>[+-]?[0-9]{1,19}(\.[0-9]{1,9})?) ?(?P<unit>[kmgt]?i?b?)", re.ASCII | re.IGNORECASE)
_TOKENS = re.compile(r"(?P<number>[0-9]{1,12}(\.[0-9]{1,6})?)(?P<unit>[kmgKMG]?)", re.ASCII)
_POWERS = "kmgt"


def inverted(text: str) -> str | None:
    """The negation: "true" for "false"; None for a text that is neither."""
    lowered = text.lower()
    return "false" if lowered in TRUE else "true" if lowered in FALSE else None


def parse_integer(text: str) -> int | None:
    """The integer of a text of at most 19 digits; None if it is not one."""
    return int(text) if _WHOLE.fullmatch(text.strip()) else None


def size_in_bytes(text: str) -> int | None:
    """Bytes of "4096", "4GB" or "4GiB"; engines mean powers of 1024 by both. None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    power = _POWERS.find(match["unit"][:1].lower()) + 1 if match["unit"] else 0
    return int(Decimal(match["number"]) * 1024**power)


def tokens(text: str) -> int | None:
    """Tokens of "32768", "32k" (32 000) or "32K" (32 768); None if it is not such a number."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        return None
    unit = match["unit"]
    base = 1024 if unit.isupper() else 1000
    return int(Decimal(match["number"]) * base ** (_POWERS.find(unit.lower()) + 1 if unit else 0))


def scaled(text: str, factor: str) -> str | None:
    """A number times a factor, in decimal notation without trailing zeros; None if it is not a finite number."""
    try:
        number = Decimal(text.strip()) if len(text) <= 40 else None
    except InvalidOperation:
        return None
    if number is None or not number.is_finite() or abs(number.adjusted()) > 30:
        return None
    return f"{(number * Decimal(factor)).quantize(Decimal('1e-9')).normalize():f}"


def fraction_of(part: int, total: int) -> str:
    """`part` of `total` bytes as a fraction, rounded down to four places, so that it is never more memory."""
    return f"{(Decimal(part) / Decimal(total)).quantize(Decimal('0.0001'), ROUND_DOWN).normalize():f}"


def read_json(text: str) -> Any:
    """The value of a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_text(value: object) -> str:
    """A JSON value as on a command line: true, 1,2,3, or JSON if there is no simpler form."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(json_text(part) for part in value)
    return value if isinstance(value, str) else json.dumps(value)
