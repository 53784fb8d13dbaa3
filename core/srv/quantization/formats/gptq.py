"""Checkpoints of GPTQ, by AutoGPTQ and GPTQModel: how their configurations state it. Torch-free.

Must not know what is stored: `srv.quantization.formats.packed_integers` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.quantization.formats.auto_round import PACKING
from srv.quantization.formats.layer_patterns import REGEX, check_pattern
from srv.quantization.formats.packed_integers import PackedForm, excluded_of, first, group_of, grouped, method
from srv.quantization.formats.stored_counts import bits_of, ceil, group_size, names_of, one_layout
from srv.quantization.method import StoredCounts, UnknownStorage

NAME = "gptq"


def read_form(quant_config: Mapping[str, Any]) -> PackedForm | str:
    bits, form = first(quant_config, "bits"), str(first(quant_config, "checkpoint_format", "format") or "gptq").lower()
    symmetric = bool(first(quant_config, "sym", default=True))
    if bits not in (4, 8):
        return f"its integers have {bits} bits, not 4 or 8"
    if form not in ("gptq", "gptq_v2"):
        return f"it is packed for the kernels {form}"
    if quant_config.get("pack_dtype") not in (None, "int32"):
        return f"it is packed in words of {quant_config['pack_dtype']}, not int32"
    rules = quant_config.get("dynamic") or {}
    if other := [rule for rule in rules if not rule.startswith("-:")]:
        return f"its layers are quantized differently (dynamic has a rule for {other[0]!r})"
    if bits == 8 and not symmetric:
        return "its 8-bit integers have zero points other than 128 (sym is false)"
    left_out = tuple(f"{REGEX}{rule.removeprefix('-:')}" for rule in rules)
    for pattern in left_out:
        check_pattern("dynamic", pattern)
    excluded = (*left_out, *excluded_of(quant_config))
    group = group_of(quant_config)
    ordered, offset = bool(quant_config.get("desc_act")) and group > 0, int(form == "gptq")
    indexed = PACKING not in quant_config
    return grouped(PackedForm("gptq", bits, group, symmetric, ordered, offset, excluded, indexed=indexed))


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: packed along the inputs, with scales, zeros and the group of each input (GPTQModel)."""
    form = first(config, "checkpoint_format", "format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnknownStorage(f"GPTQ weights of format {form} are not known")
    per_word, size = 32 // bits_of(config, "bits"), group_size(config, "group_size")
    rules = config.get("dynamic") or {}
    if any(not rule.startswith("-:") for rule in rules) or config.get("modules_in_block_to_quantize"):
        raise UnknownStorage("its modules are quantized differently from one another")
    excluded = [f"{REGEX}{rule.removeprefix('-:')}" for rule in rules] + names_of(config, "modules_to_not_convert")

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = ceil(inputs, size) if size else 1
        packed = ceil(inputs, per_word) * outputs + groups * ceil(outputs, per_word)
        return {"int32": packed + (inputs if PACKING not in config else 0), "float16": groups * outputs}

    return one_layout(layout, excluded, head=bool(config.get("lm_head")))


METHOD = method(NAME, read_form, "srv.quantization.formats.gptq_storage:GPTQStorageFormat", stored=stored)
