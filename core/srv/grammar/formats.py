"""Formats of strings as regular expressions, where grammar libraries allow values that are none: April 31, 10.0.0.09.

Sources: RFC 3339 (date, time, date-time), RFC 4291 (ipv6). Must not know any library.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.json_schema import below

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # not 0000
_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # of any month
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?"
_OFFSET = "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
TIME = f"{_CLOCK}{_OFFSET}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        f"({_GROUP}:){{1,7}}:",
        *(f"({_GROUP}:){{1,{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(6, 0, -1)),
        f":((:{_GROUP}){{1,7}}|:)",
        f"({_GROUP}:){{6}}{_IPV4}",
        f"::({_GROUP}:){{0,5}}{_IPV4}",
    ]
)
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "date": f"^({_DATE})$",
        "date-time": f"^({_DATE}[Tt]{TIME})$",
        "ipv4": f"^({_IPV4})$",
        "ipv6": f"^({_IPV6})$",
    }
)


def write_formats(schema: object) -> None:
    """Put patterns in the place of these formats; one that stands beside a pattern is left to the library."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "pattern" not in node and (pattern := _pattern(node)) is not None:
                del node["format"]
                node["pattern"] = pattern
            waiting += [part for part, _ in below(node, "")]


def _pattern(node: Mapping[str, Any]) -> str | None:
    name = node.get("format")
    return PATTERNS.get(name) if isinstance(name, str) else None
