"""Conversions that depend on their own flag only."""

from __future__ import annotations

import fnmatch
import json
from decimal import ROUND_CEILING, Decimal

from srv.args.dialects.interface import ConversionInput, Converted, Outcome, Untranslatable, set_argument, wrong_type
from srv.args.dialects.values import inverted, parse_integer, read_json, scaled, tokens


def same(given: ConversionInput) -> Outcome:
    """The text, unchanged."""
    return set_argument(given, given.text)


def opposite(given: ConversionInput) -> Outcome:
    """The negation of a switch."""
    text = inverted(given.text)
    return wrong_type(given, "true or false") if text is None else set_argument(given, text)


def whole_scale(given: ConversionInput) -> Outcome:
    """Convert to the unit of an integer argument, rounded up."""
    text = scaled(given.text, given.row.factor)
    if text is None:
        return wrong_type(given, "a number")
    return set_argument(given, str(int(Decimal(text).to_integral_value(ROUND_CEILING))))


def reserve(given: ConversionInput) -> Outcome:
    """A percentage to reserve, as a factor on the expected amount: 5 becomes 1.05."""
    text = scaled(given.text, "0.01")
    return (
        wrong_type(given, "a percentage")
        if text is None
        else set_argument(given, f"{(1 + Decimal(text)).normalize():f}")
    )


def choice(given: ConversionInput) -> Outcome:
    """Settings by value, from the row's `values`; a value that matches no pattern is refused."""
    for pattern, settings in given.row.values.items():
        if fnmatch.fnmatchcase(given.text.lower(), pattern.lower()):
            return Converted({name: text.replace("{}", given.text) for name, text in settings.items()})
    known = ", ".join(pattern or '""' for pattern in given.row.values)
    remedy = given.row.remedy or f"Values that can be translated: {known}."
    return Untranslatable("no_equivalent_value", "srv has no equivalent value", remedy)


def token_count(given: ConversionInput) -> Outcome:
    """A number of tokens, which may end in k, K, m or M."""
    number = tokens(given.text)
    return wrong_type(given, "a number of tokens") if number is None else set_argument(given, str(number))


def filled(given: ConversionInput) -> Outcome:
    """An integer, inserted into the row's template."""
    number = parse_integer(given.text)
    if number is None:
        return wrong_type(given, "an integer")
    return set_argument(given, given.row.template.replace("%d", str(number)))


def only_one(given: ConversionInput) -> Outcome:
    """A list of one member, because `srv` supports only one."""
    members = [member for member in given.text.split(",") if member]
    if len(members) != 1:
        reason = f"srv supports only one, and {len(members)} are given"
        return Untranslatable("one_only", reason, "Keep one, and use a proxy in front of srv for more.")
    return set_argument(given, members[0])


def adapters(given: ConversionInput) -> Outcome:
    """LoRA adapters: name=path, or JSON objects with a name and a path, or with names as keys and paths as values."""
    text = given.text.strip()
    if not text.startswith("{"):
        return set_argument(given, text)
    read = read_json(f"[{text}]")
    if not isinstance(read, list) or not all(isinstance(each, dict) for each in read):
        return wrong_type(given, "NAME=PATH or a JSON object")
    pairs: list[tuple[object, object]] = []
    for each in read:
        pairs += [(each["name"], each["path"])] if {"name", "path"} <= each.keys() else list(each.items())
    if any(not isinstance(part, str) or not part or "," in part for pair in pairs for part in pair):
        return wrong_type(given, "a JSON object of adapter names and paths")
    return set_argument(given, ",".join(f"{name}={path}" for name, path in pairs))


def json_entry(given: ConversionInput) -> Outcome:
    """A JSON object with this value as its only entry; the row's template is the key."""
    read = read_json(given.text)
    if read is None:
        return Untranslatable("bad_value", "it is not valid JSON", f"Write the value of {given.flag} as JSON.")
    return set_argument(given, json.dumps({given.row.template: read}))
