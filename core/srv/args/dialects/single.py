"""Conversions that look at one flag alone."""

from __future__ import annotations

import fnmatch
import json
from decimal import ROUND_CEILING, Decimal

from srv.args.dialects.given import Converted, Given, Outcome, Unfit, no_number, to
from srv.args.dialects.values import inverted, read_json, scaled, tokens, whole


def same(given: Given) -> Outcome:
    """The text as it is."""
    return to(given, given.text)


def opposite(given: Given) -> Outcome:
    """A switch of the other sense."""
    text = inverted(given.text)
    return no_number(given, "true or false") if text is None else to(given, text)


def whole_scale(given: Given) -> Outcome:
    """Another unit for an argument that takes whole numbers: rounded up, so that nothing is lost."""
    text = scaled(given.text, given.row.factor)
    if text is None:
        return no_number(given, "a number")
    return to(given, str(int(Decimal(text).to_integral_value(ROUND_CEILING))))


def reserve(given: Given) -> Outcome:
    """A percentage to hold back as a factor on what is expected: 5 becomes 1.05."""
    text = scaled(given.text, "0.01")
    return no_number(given, "a percentage") if text is None else to(given, f"{(1 + Decimal(text)).normalize():f}")


def choice(given: Given) -> Outcome:
    """Settings by value, as the row's `values` list them; a value that none of its patterns fits is refused."""
    for pattern, settings in given.row.values.items():
        if fnmatch.fnmatchcase(given.text.lower(), pattern.lower()):
            return Converted({name: text.replace("{}", given.text) for name, text in settings.items()})
    known = ", ".join(pattern or '""' for pattern in given.row.values)
    remedy = given.row.remedy or f"Values that can be translated: {known}."
    return Unfit("no_equivalent_value", "no value of an argument of srv means the same", remedy)


def token_count(given: Given) -> Outcome:
    """A number of tokens that may end in k, K, m, M."""
    number = tokens(given.text)
    return no_number(given, "a number of tokens") if number is None else to(given, str(number))


def filled(given: Given) -> Outcome:
    """A whole number put into the row's template."""
    number = whole(given.text)
    if number is None:
        return no_number(given, "a whole number")
    return to(given, given.row.template.replace("%d", str(number)))


def only_one(given: Given) -> Outcome:
    """A list of which `srv` takes one member."""
    members = [member for member in given.text.split(",") if member]
    if len(members) != 1:
        reason = f"srv takes one, and {len(members)} are given"
        return Unfit("one_only", reason, "Give one, and put a proxy before srv for more.")
    return to(given, members[0])


def adapters(given: Given) -> Outcome:
    """LoRA adapters: name=path as it is; JSON objects of name and path (one, or a map of names to paths) likewise."""
    text = given.text.strip()
    if not text.startswith("{"):
        return to(given, text)
    read = read_json(f"[{text}]")
    if not isinstance(read, list) or not all(isinstance(each, dict) for each in read):
        return no_number(given, "NAME=PATH or a JSON object")
    pairs: list[tuple[object, object]] = []
    for each in read:
        pairs += [(each["name"], each["path"])] if {"name", "path"} <= each.keys() else list(each.items())
    if any(not isinstance(part, str) or not part or "," in part for pair in pairs for part in pair):
        return no_number(given, "a JSON object of adapters' names and paths")
    return to(given, ",".join(f"{name}={path}" for name, path in pairs))


def json_entry(given: Given) -> Outcome:
    """A JSON value as the only entry of an object; the row's template is its key."""
    read = read_json(given.text)
    if read is None:
        return Unfit("bad_value", "it is no JSON value", f"Write {given.flag} as JSON.")
    return to(given, json.dumps({given.row.template: read}))
