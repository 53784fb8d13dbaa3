"""Checkpoints of AutoRound: its `quantization_config` as one of AWQ or GPTQ, whose layouts it packs integers in.

    packing_format           tensors of a linear layer
    auto_round:auto_gptq     qweight, qzeros and scales of GPTQ, whose zeros are less 1, and no g_idx
    auto_round:auto_awq      those of AWQ

Other packings, and types other than integers, are named as what they are packed for, which the methods refuse. Layers
that `extra_config` leaves in floats are excluded. (Format: vLLM's `AutoRoundConfig`) Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from srv.quantization.formats.layer_patterns import REGEX

NAMES = ("auto-round", "intel/auto-round")
PACKING = "packing_format"
_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_FLOAT_BITS = 16
_SETTINGS = ("bits", "group_size", "sym")


def as_packed(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of AWQ or GPTQ that say the same."""
    packing, kind = str(stated.get(PACKING) or stated.get("backend") or _GPTQ), str(stated.get("data_type") or "int")
    common = {name: stated[name] for name in ("bits", "group_size", "lm_head") if name in stated}
    excluded, others = _layers(stated)
    common |= {"modules_to_not_convert": excluded, PACKING: packing}
    if kind != "int" or packing not in (_GPTQ, _AWQ) or (others and packing == _AWQ):
        form = f"of AutoRound ({packing}, {kind})"
        return {**common, "quant_method": "gptq", "format": form, "dynamic": {name: {} for name in others}}
    if packing == _AWQ:
        return {**common, "quant_method": "awq", "zero_point": not stated.get("sym", True)}
    own = {"sym": stated.get("sym", True), "desc_act": False, "dynamic": {name: {} for name in others}}
    return {**common, **own, "quant_method": "gptq"}


def _layers(stated: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The layers that are not quantized, and those that are quantized otherwise than most."""
    excluded, others = list[str](), list[str]()
    extra = stated.get("extra_config")
    for name, own in extra.items() if isinstance(extra, Mapping) else ():
        if not isinstance(own, Mapping):
            others.append(str(name))
        elif isinstance(bits := own.get("bits"), int) and bits >= _FLOAT_BITS:
            is_pattern = re.search(r"[*+?\[\]()|\\^$]", name) is not None
            excluded.append(f"{REGEX}{name}" if is_pattern else name)
        elif any(own.get(each, stated.get(each)) != stated.get(each) for each in _SETTINGS):
            others.append(name)
    return excluded, others
