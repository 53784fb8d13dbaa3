"""All conversions by name, and `convert`, which applies a row to the value of a flag.

They convert units and negations. Whether the result is a valid value is decided by the argument's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from srv.args.dialects import joint, single
from srv.args.dialects.interface import Conversion, ConversionInput, Converted, Outcome, Untranslatable
from srv.args.dialects.values import json_text, read_json
from srv.args.dialects.words import short
from srv.args.spec import nearest


def convert(setting: ConversionInput) -> Outcome:
    """Apply a row: first its harmless values, then its refusal, then its conversion."""
    row = setting.row
    if setting.text.strip().lower() in (value.lower() for value in row.harmless):
        return Converted({}, "no setting is needed")
    if row.refused:
        return Untranslatable("no_equivalent", row.refused, row.remedy)
    if row.yields_to and setting.other(row.yields_to):
        return Converted({}, f"{row.yields_to} determines it")
    outcome = CONVERSIONS[row.conversion](setting)
    if row.also and isinstance(outcome, Converted) and outcome.settings:
        return replace(outcome, settings={**outcome.settings, **row.also})
    return outcome


def json_fields(setting: ConversionInput) -> Outcome:
    """Convert a JSON object key by key, by the row's `fields`; if one key is refused, the whole flag is."""
    read = read_json(setting.text)
    if not isinstance(read, dict):
        return Untranslatable("bad_value", "it is not a JSON object", f"Write {setting.flag} '{{...}}'.")
    texts = {key: json_text(value) for key, value in read.items() if value is not None}
    settings: dict[str, str] = {}
    notes: list[str] = []
    for key, text in texts.items():
        row = setting.row.fields.get(key)
        if row is None:
            near = nearest(key, setting.row.fields)
            remedy = f"Did you mean {near}?" if near else f"Known keys: {', '.join(setting.row.fields)}."
            return Untranslatable("unknown_key", f"its key {short(key)} is not known", remedy)
        outcome = convert(replace(setting, flag=f"{setting.flag} {key}", text=text, row=row, others=texts))
        if isinstance(outcome, Untranslatable):
            return replace(outcome, reason=f"key {key}: {outcome.reason}")
        settings.update(outcome.settings)
        if outcome.note or not outcome.settings:
            notes.append(f"key {key}: {outcome.note or 'no setting is needed'}")
    return Converted(settings, "; ".join(notes))


CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        "same": single.same,
        "opposite": single.opposite,
        "whole_scale": single.whole_scale,
        "reserve": single.reserve,
        "choice": single.choice,
        "token_count": single.token_count,
        "filled": single.filled,
        "only_one": single.only_one,
        "adapters": single.adapters,
        "memory_fraction": joint.memory_fraction,
        "memory_left": joint.memory_left,
        "product": joint.product,
        "unless_zero": joint.unless_zero,
        "replicas": joint.replicas,
        "nodes": joint.nodes,
        "node_of_rank": joint.node_of_rank,
        "concurrency": joint.concurrency,
        "address": joint.address,
        "step_budget": joint.step_budget,
        "whole_prompts": joint.whole_prompts,
        "scattered_input": joint.scattered_input,
        "with_partner": joint.with_partner,
        "draft_tokens": joint.draft_tokens,
        "kv_role": joint.kv_role,
        "json_fields": json_fields,
        "json_entry": single.json_entry,
    }
)
