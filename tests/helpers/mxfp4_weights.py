"""Small checkpoints in MXFP4: gpt-oss as it is published, and compressed-tensors' format."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models_small import SIZES, edit_config, randomized, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GPT_OSS = {
    **{"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2},
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "pad_token_id": 0},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def mxfp4(seed: int, *shape: int, lowest: int = -5) -> tuple[Tensor, Tensor]:
    """Random blocks [..., 16] of the weights of this shape [..., K], and scales from 2^lowest to 2^(lowest + 2)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(3, blocks.shape[:-1], generator=generator).add(127 + lowest).to(torch.uint8)


def write_gpt_oss(
    folder: Path, spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None, **fields: Any
) -> Any:
    """A checkpoint with the tensors of the published ones. Returns the model that transformers makes of the weights.

    fields: of its configuration.
    """
    config = AutoConfig.for_model("gpt_oss", **{**SIZES, **GPT_OSS, **fields})
    torch.manual_seed(0)
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    save_mxfp4_experts(model, folder, spoil=spoil)
    return model


def save_mxfp4_experts(
    model: Any,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    lowest: int = -5,
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
) -> None:
    """Save a gpt-oss model as published, and give its experts the values of the random blocks that are stored.

    `dtype`: of the other tensors. `lowest`: as in `mxfp4`.
    """
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = load_file(file)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape  # transformers has them transposed
            blocks, scales = mxfp4(index, experts, outputs, inputs, lowest=lowest)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    spoil(stored)
    save_file(stored, file, {"format": "pt"})
    edit_config(folder, quantization_config=STATED)


def compressed(**group: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **group}}
    form = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return {**form, "config_groups": groups, "ignore": ["lm_head"]}


def write_compressed(folder: Path) -> Any:
    """A checkpoint of a dense model whose projections are in MXFP4. Returns a model with the same weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    model = small_model("llama", **sizes)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("_proj.weight"):
            blocks, scales = mxfp4(index, *parameter.shape)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t())
            layer = name.removesuffix(".weight")
            del stored[name]
            stored |= {f"{layer}.weight_packed": blocks.flatten(1), f"{layer}.weight_scale": scales}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=compressed())
    return model
