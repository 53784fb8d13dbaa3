"""Conversions that depend on their own flag only."""

from __future__ import annotations

import fnmatch
import json
from decimal import ROUND_CEILING, Decimal

from srv.args.dialects.interface import ConversionInput, Converted, Outcome, Untranslatable, set_argument, wrong_type
from srv.args.dialects.values import inverted, parse_integer, read_json, scaled, tokens


def same(setting: ConversionInput) -> Outcome:
    """The text, unchanged."""
    return set_argument(setting, setting.text)


def opposite(setting: ConversionInput) -> Outcome:
    """The negation of a switch."""
    text = inverted(setting.text)
    return wrong_type(setting, "true or false") if text is None else set_argument(setting, text)


def whole_scale(setting: ConversionInput) -> Outcome:
    """Convert to the unit of an integer argument, rounded up."""
    text = scaled(setting.text, setting.row.factor)
    if text is None:
        return wrong_type(setting, "a number")
    return set_argument(setting, str(int(Decimal(text).to_integral_value(ROUND_CEILING))))


def reserve(setting: ConversionInput) -> Outcome:
    """A percentage to reserve, as a factor on the expected amount: 5 becomes 1.05."""
    text = scaled(setting.text, "0.01")
    return (
        wrong_type(setting, "a percentage")
        if text is None
        else set_argument(setting, f"{(1 + Decimal(text)).normalize():f}")
    )


def choice(setting: ConversionInput) -> Outcome:
    """Settings by value, from the row's `values`; a value that matches no pattern is refused."""
    for pattern, settings in setting.row.values.items():
        if fnmatch.fnmatchcase(setting.text.lower(), pattern.lower()):
            return Converted({name: text.replace("{}", setting.text) for name, text in settings.items()})
    patterns = ", ".join(pattern or '""' for pattern in setting.row.values)
    remedy = setting.row.remedy or f"Values that can be translated: {patterns}."
    return Untranslatable("no_equivalent_value", "srv has no equivalent value", remedy)


def token_count(setting: ConversionInput) -> Outcome:
    """A number of tokens, which may end in k, K, m or M."""
    number = tokens(setting.text)
    return wrong_type(setting, "a number of tokens") if number is None else set_argument(setting, str(number))


def filled(setting: ConversionInput) -> Outcome:
    """An integer, inserted into the row's template."""
    number = parse_integer(setting.text)
    if number is None:
        return wrong_type(setting, "an integer")
    return set_argument(setting, setting.row.template.replace("%d", str(number)))


def only_one(setting: ConversionInput) -> Outcome:
    """A list of one member, because `srv` supports only one."""
    members = [member for member in setting.text.split(",") if member]
    if len(members) != 1:
        reason = f"srv supports only one, and {len(members)} are given"
        return Untranslatable("one_only", reason, "Keep one, and use a proxy in front of srv for more.")
    return set_argument(setting, members[0])


def adapters(setting: ConversionInput) -> Outcome:
    """LoRA adapters: name=path, or JSON objects with a name and a path, or with names as keys and paths as values."""
    text = setting.text.strip()
    if not text.startswith("{"):
        return set_argument(setting, text)
    read = read_json(f"[{text}]")
    if not isinstance(read, list) or not all(isinstance(adapter, dict) for adapter in read):
        return wrong_type(setting, "NAME=PATH or a JSON object")
    pairs: list[tuple[object, object]] = []
    for adapter in read:
        pairs += [(adapter["name"], adapter["path"])] if {"name", "path"} <= adapter.keys() else list(adapter.items())
    if any(not isinstance(part, str) or not part or "," in part for pair in pairs for part in pair):
        return wrong_type(setting, "a JSON object of adapter names and paths")
    return set_argument(setting, ",".join(f"{name}={path}" for name, path in pairs))


def json_entry(setting: ConversionInput) -> Outcome:
    """A JSON object with this value as its only entry; the row's template is the key."""
    read = read_json(setting.text)
    if read is None:
        return Untranslatable("bad_value", "it is not valid JSON", f"Write the value of {setting.flag} as JSON.")
    return set_argument(setting, json.dumps({setting.row.template: read}))
