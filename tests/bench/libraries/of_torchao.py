"""Weights as torchao quantizes them, and the configuration that transformers writes."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from case import LAYER, Case, Cases, full_range, llama, random_weight
from torch import Tensor

FBGEMM = "fbgemm_gpu/experimental/gen_ai/quantize.py"


def cases() -> Cases:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
        PerRow,
        PerTensor,
        quant_api,
    )

    quant_api._check_hardware_support = lambda granularity: None  # of the products, which are not computed here
    configs = {
        "int8": Int8WeightOnlyConfig(version=2),
        "int8 and int8 activations": Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8 per row": Float8WeightOnlyConfig(granularity=PerRow()),
        "fp8 in groups": Float8WeightOnlyConfig(granularity=PerGroup(32)),
        "fp8 per tensor": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
    }
    for name, config in configs.items():
        yield name, torchao_case(random_weight(8 if "int8" in name else 16), config)
    mslk_of_fbgemm()
    for group in (32, 64):
        weight = full_range(24, group)[0].bfloat16()
        yield f"int4 in groups of {group}", torchao_case(weight, Int4WeightOnlyConfig(group_size=group))


def torchao_case(weight: Tensor, config: Any) -> Case:
    """Stored by the function with which transformers stores weights of torchao."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    from transformers import TorchAoConfig

    model = llama(weight.shape[0])
    layer = model.get_submodule(LAYER)
    layer.weight.data = weight
    quantize_(model, config, filter_fn=lambda module, name: name == LAYER)
    excluded = ["lm_head", *(f"model.layers.0.self_attn.{projection}_proj" for projection in "qkvo")]
    torchao_config = TorchAoConfig(config, modules_to_not_convert=[*excluded, "gate_proj", "up_proj"])
    tensors, _ = flatten_tensor_state_dict({f"{LAYER}.weight": layer.weight.data})
    dequantized = torchao_weight(weight, layer.weight.data)
    return Case(f"torchao {version('torchao')}", torchao_config.to_dict(), tensors, {LAYER: dequantized})


def torchao_weight(weight: Tensor, quantized: Any) -> Tensor:
    if type(quantized).__name__ != "Int4Tensor":
        quantized.scale = quantized.scale.float()
        return quantized.dequantize(torch.float32)
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp
    from torchao.quantization.quantize_.workflows.int4 import int4_tensor

    group = quantized.block_size[-1]
    codes, _, _ = int4_tensor.int4_row_quantize_zp(weight, group)  # as they were packed: only GPU kernels unpack
    return _int4_row_dequantize_zp(codes, quantized.scale.float(), quantized.zero_point.float(), group)


def mslk_of_fbgemm() -> None:
    """Give torchao the functions of MSLK that pack 4 bits, from FBGEMM, which they come from; its kernels need GPUs."""
    from torchao.quantization.quantize_.workflows.int4 import int4_tensor

    file = next(candidate for candidate in (Path(path) / FBGEMM for path in sys.path) if candidate.is_file())
    source = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("from fbgemm_gpu"))
    functions: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), functions)
    for name in ("int4_row_quantize_zp", "pack_int4"):
        setattr(int4_tensor, name, functions[name])
