"""Small checkpoints of compressed-tensors whose groups of layers have different schemes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fp8_weights
import packed_weights
import torch
from models_small import edit_config, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.quantization.formats.online_storage import quantize_int8

INT8_ARGS = {"num_bits": 8, "type": "int", "symmetric": True}


class Group(NamedTuple):
    """`stored`: a layer's tensors by their full names, and its weights as they are then. `fields`: of its group."""

    fields: Mapping[str, Any]
    stored: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def of_integers(**fields: Any) -> Group:
    form = packed_weights.compressed(**fields)
    return Group(
        {**form.config["config_groups"]["group_0"], "format": "pack-quantized"},
        lambda name, weight: packed_weights.packed(name, weight, form),
    )


def of_floats(strategy: str = "channel", **fields: Any) -> Group:
    config = fp8_weights.compressed(strategy, **fields)["config_groups"]["group_0"]
    block = {"channel": fp8_weights.ROW, "tensor": (0, 0)}.get(strategy) or tuple(fields["block_structure"])
    form = fp8_weights.Form("fp8", None, block)

    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, scale, plain = fp8_weights.quantized(weight, form)
        return {f"{name}.weight": values, f"{name}.weight_scale": scale}, plain

    return Group({**config, "format": "float-quantized"}, stored)


def of_int8() -> Group:
    weights = {**INT8_ARGS, "strategy": "channel", "dynamic": False}
    inputs = {**INT8_ARGS, "strategy": "token", "dynamic": True}

    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, scale = quantize_int8(weight)
        return {f"{name}.weight": values, f"{name}.weight_scale": scale}, values.float() * scale

    return Group({"weights": weights, "input_activations": inputs, "format": "int-quantized"}, stored)


def config_of(
    groups: Mapping[Any, Group], form: str = "mixed-precision", ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    """A quantization_config; `groups`: by their targets. Their formats are left out unless `form` is the mixed one."""
    by_name: dict[str, Any] = {}
    for number, (targets, group) in enumerate(groups.items()):
        fields = copy.deepcopy({**group.fields, "targets": list(targets)})
        if form != "mixed-precision":
            del fields["format"]
        by_name[f"group_{number}"] = fields
    return {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "config_groups": by_name}


def write_mixed(
    folder: Path,
    layers: Mapping[str, Group],
    config: Mapping[str, Any],
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    kind: str = "llama",
    **fields: Any,
) -> Any:
    """A checkpoint whose layers are stored as the group of the first regular expression that finds their names.

    Returns a model of transformers with the same weights in float32. kind, fields: as of `small_model`.
    """
    unquantized = small_model(kind, **{**packed_weights.SIZES, **fields})
    unquantized.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        group = next((group for pattern, group in layers.items() if re.search(pattern, name)), None)
        if group is None or not packed_weights.PROJECTION.search(name):
            stored[name] = tensor.half()
            same[name] = stored[name].float()
        else:
            tensors, same[name] = group.stored(name.removesuffix(".weight"), tensor)
            stored |= tensors
    save_file(same, file, {"format": "pt"})
    model = type(unquantized).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    edit_config(folder, quantization_config=config)
    return model.eval()
