"""Small checkpoints of modelslim, written by the description of its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

DESCRIPTION = "quant_model_description.json"
STEP, OFFSET = 0.04, 5


class Stored(nn.Module):
    """A layer as specified by the format, in float64, from its stored tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def forward(self, x: Tensor) -> Tensor:
        got, wide = self.tensors, x.double()
        if "input_scale" in got:
            steps = (wide / got["input_scale"] + got["input_offset"]).round().clamp(-128, 127)
            return ((steps @ got["weight"].T + got["quant_bias"]) * got["deq_scale"]).float()
        scale = wide.abs().amax(-1, keepdim=True) / 127
        out = (wide / scale).round() @ got["weight"].T * scale * got["weight_scale"][:, 0]
        return (out + got.get("bias", torch.zeros(()).double())).float()


def stored_tensors(linear: nn.Linear, kind: str) -> dict[str, Tensor]:
    scale = linear.weight.abs().amax(1, keepdim=True) / 127
    whole = (linear.weight / scale).round().to(torch.int8)
    if kind == "W8A8_DYNAMIC":
        tensors = {"weight": whole, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
        return tensors if linear.bias is None else tensors | {"bias": linear.bias.data.clone()}
    deq_scale = (scale[:, 0] * STEP).contiguous()
    bias = torch.zeros(()) if linear.bias is None else linear.bias
    folded = (bias / deq_scale).round().int() - OFFSET * whole.int().sum(1).int()
    return {
        "weight": whole,
        "input_scale": torch.tensor([STEP]),
        "input_offset": torch.tensor([float(OFFSET)]),
        "quant_bias": folded,
        "deq_scale": deq_scale,
    }


def quantize(folder: Path, model: Any, kind_of: Callable[[str], str]) -> None:
    """Write the model with some int8 linear layers, and replace those of `model` with the stored ones."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kinds = {"model_quant_type": "W8A8", **dict.fromkeys(weights, "FLOAT")}
    for name, module in list(model.named_modules()):
        kind = kind_of(name) if isinstance(module, nn.Linear) else "FLOAT"
        if kind == "FLOAT":
            continue
        tensors = stored_tensors(module, kind)
        weights = {key: value for key, value in weights.items() if key.rpartition(".")[0] != name}
        weights |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        kinds |= {f"{name}.{suffix}": kind for suffix in tensors}
        model.set_submodule(name, Stored(tensors))
    save_file(weights, folder / "model.safetensors")
    (folder / DESCRIPTION).write_text(json.dumps(kinds))


def everything(kind: str) -> Callable[[str], str]:
    return lambda name: kind if name.endswith("_proj") else "FLOAT"


def mixed(name: str) -> str:
    """Dynamic attention layers, static gate and up layers, float down layers, and an int8 output layer."""
    if "self_attn" in name or name == "lm_head":
        return "W8A8_DYNAMIC"
    return "FLOAT" if name.endswith("down_proj") else "W8A8"
