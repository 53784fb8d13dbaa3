"""Small checkpoints with FP8 weights, written by the descriptions of the formats that tools have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from models_small import edit_config, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
PROJECTION = re.compile(r"(_proj|\.w[123]|_proj_with_mqa|\.wq_b|\.wk)\.weight$")
LARGEST = 448


class Form(NamedTuple):
    """One form of checkpoints.

    config: its quantization_config; None if a file of its own states it. method: as which it is recognised. block:
    (outputs, inputs) that share a scale; (0, 0): one scale for the whole weight. suffix: of the scales. shape: makes a
    stored scale of one value per block. extra: further tensors of each layer, by their suffixes. files: their contents.
    weight: the suffix of the stored weights.
    """

    method: str
    config: dict[str, Any] | None
    block: tuple[int, int] = (0, 0)
    suffix: str = "weight_scale"
    shape: Callable[[Tensor], Tensor] = lambda scale: scale
    extra: Mapping[str, float] = MappingProxyType({})
    dtype: torch.dtype = torch.float32
    files: Mapping[str, Any] = MappingProxyType({})
    weight: str = "weight"


def fp8(block: tuple[int, int] | None = None, **fields: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **fields}
    return {**config, "weight_block_size": None if block is None else list(block)}


def compressed(strategy: str, dynamic: bool = True, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**args, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": {**args, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic},
    }
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return {**config, "config_groups": {"group_0": group}}


ROW = (1, 1 << 20)
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}}}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
FORMS = {
    "fp8, one scale": Form("fp8", fp8(), shape=lambda scale: scale.reshape(())),
    "fp8, static": Form("fp8", fp8(activation_scheme="static"), extra={"input_scale": 0.5}),
    "fp8, names of transformers": Form(
        "fp8", fp8(), suffix="weight_scale_inv", shape=lambda scale: scale.reshape(()), extra={"activation_scale": 2.0}
    ),
    "fp8, blocks": Form("fp8", fp8((32, 32)), (32, 32), "weight_scale_inv"),
    "fp8, blocks that end within layers": Form("fp8", fp8((48, 64)), (48, 64), "weight_scale_inv"),
    "fp8, blocks scaled by powers of two": Form(
        "fp8", fp8((32, 32), scale_fmt="ue8m0"), (32, 32), "weight_scale_inv", dtype=torch.float8_e8m0fnu
    ),
    "fp8, blocks with the other name": Form("fp8", fp8((128, 128)), (128, 128)),
    "fbgemm_fp8": Form("fbgemm_fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ROW),
    "compressed-tensors, tensor": Form("fp8", compressed("tensor", dynamic=False), extra={"input_scale": 0.25}),
    "compressed-tensors, channel": Form("fp8", compressed("channel"), ROW, dtype=torch.bfloat16),
    "compressed-tensors, block": Form("fp8", compressed("block", block_structure=[64, 32]), (64, 32)),
    "modelopt": Form(
        "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, extra={"input_scale": 1.0}
    ),
    "modelopt, a file of its own": Form(
        "modelopt", None, extra={"input_scale": 1.0}, files={"hf_quant_config.json": MODELOPT}
    ),
    "modelopt, the fields of its file": Form(
        "modelopt", {"quant_method": "modelopt", **MODELOPT}, extra={"input_scale": 1.0}
    ),
    "modelopt, per channel": Form(
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        ROW,
        shape=lambda scale: scale[:, 0],
    ),
    "modelopt, blocks": Form(
        "modelopt",
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        (128, 128),
        shape=lambda scale: scale[:, None, :, None],
    ),
    "torchao": Form("torchao", TORCHAO, ROW, "_weight_scale", weight="_weight_qdata"),
}


def quantized(weight: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """The stored weight and scale of a layer, and its weights as they are then in float32."""
    rows, columns = (size or extent for size, extent in zip(form.block, weight.shape, strict=True))
    outputs, inputs = (torch.arange(extent) // size for extent, size in zip(weight.shape, (rows, columns), strict=True))
    scale = torch.zeros(int(outputs[-1]) + 1, int(inputs[-1]) + 1)
    for row, column in ((row, column) for row in range(scale.shape[0]) for column in range(scale.shape[1])):
        part = weight[outputs == row][:, inputs == column]
        scale[row, column] = (part.abs().max() / LARGEST).to(form.dtype).float() * 1.0625
    scale = scale.to(form.dtype).float()
    wide = scale[outputs][:, inputs]
    stored = (weight / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return stored, form.shape(scale).to(form.dtype), stored.float() * wide


def write_fp8(
    folder: Path,
    form: Form,
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    kind: str = "llama",
    made: Any = None,
    **fields: Any,
) -> Any:
    """A checkpoint of this form. Returns a model of transformers with the same weights in float32.

    kind, fields: as of `small_model`; made: a model in place of that.
    """
    made = made or small_model(kind, **{**SIZES, **fields})
    made.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not PROJECTION.search(name):
            stored[name] = tensor.bfloat16()
            same[name] = stored[name].float()
            continue
        layer = name.removesuffix(".weight")
        weight = f"{layer}.{form.weight}"
        stored[weight], stored[f"{layer}.{form.suffix}"], same[name] = quantized(tensor, form)
        stored |= {f"{layer}.{suffix}": torch.tensor(value) for suffix, value in form.extra.items()}
    save_file(same, file, {"format": "pt"})
    model = type(made).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    if form.config is not None:
        edit_config(folder, quantization_config=form.config)
    for name, contents in form.files.items():
        (folder / name).write_text(json.dumps(contents))
    return model.eval()
