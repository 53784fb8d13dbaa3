"""Small checkpoints of ModelOpt in NVFP4, written by the format's definition."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models_small import edit_config
from safetensors.torch import load_file, save_file
from torch import Tensor

STATED: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
DENSE = r"_proj(_with_mqa)?\.weight$"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Spoil = Callable[[dict[str, Tensor]], object]


def nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a weight [N, K] by their suffixes, and the float32 weights that they mean."""
    groups, values = weight.unflatten(1, (-1, 16)), torch.tensor([*E2M1, *(-each for each in E2M1)])
    whole = weight.abs().max() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * whole).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - values).abs().argmin(-1)
    pairs = codes.flatten(1).to(torch.uint8)
    stored = {"weight": pairs[:, 0::2] | pairs[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": whole}
    same = (values[codes] * scales.float().unsqueeze(-1) * whole).flatten(1)
    return {**stored, "input_scale": torch.tensor(0.25)}, same


def write(
    folder: Path, model: Any, quantized: str = DENSE, spoil: Spoil = lambda tensors: None, **stated: Any
) -> dict[str, Tensor]:
    """Save a model of transformers with the weights of these names in NVFP4, and give it what they mean.

    stated: fields of its quantization_config. Returns all weights as they are then, by their names.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        stored[name] = tensor.bfloat16()
        same[name] = stored[name].float()
        if re.search(quantized, name):
            tensors, same[name] = nvfp4(tensor)
            stored |= {f"{name.removesuffix('weight')}{suffix}": each for suffix, each in tensors.items()}
    save_file(same, file, {"format": "pt"})
    changed = type(model).from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(changed.state_dict())
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    edit_config(folder, dtype="bfloat16", quantization_config={**STATED, **stated})
    return same
