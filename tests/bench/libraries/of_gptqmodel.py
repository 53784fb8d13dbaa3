"""Layers of GPTQ and AWQ as GPTQModel packs them, and the configuration that it writes."""

from __future__ import annotations

import json
import types
from typing import Any

import torch
from case import INPUTS, LAYER, Case, Cases, full_range, random_weight
from torch import nn


def cases() -> Cases:
    zeros, ordered = {"sym": False}, {"desc_act": True}
    for name, outputs, bits, group, fields in (
        ("gptq", 32, 4, 32, {}),
        ("gptq of one group", 20, 4, -1, {}),  # of which the last zero points do not fill a word
        ("gptq in the order of activations", 8, 4, 32, ordered),
        ("gptq with zero points", 20, 4, 32, zeros),
        ("gptq v2 with zero points, in the order of activations", 8, 4, 32, zeros | ordered),
        ("gptq of 8 bits", 8, 8, 32, {}),
    ):
        form = "gptq_v2" if "v2" in name else "gptq"
        yield name, gptq_case(outputs, bits, group, {"sym": True, "desc_act": False, **fields}, form)
    yield "awq of gptqmodel", gptqmodel_awq_case(sym=False)
    yield "awq without zero points", gptqmodel_awq_case(sym=True)


def gptq_case(outputs: int, bits: int, group: int, fields: dict[str, bool], form: str) -> Case:
    """Weights are rounded, as GPTQ rounds the last of them; packed and dequantized by the layer for CPUs."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    size = INPUTS if group < 0 else group
    gptq_config = QuantizeConfig(bits=bits, group_size=group, format=FORMAT(form), **fields)
    weight = random_weight(outputs, torch.float16).float() if fields["sym"] else full_range(outputs, size)[0]
    scales_and_zeros = []
    for part in weight.split(size, 1):
        quantizer = Quantizer(gptq_config, name=LAYER)
        quantizer.configure(perchannel=True)
        quantizer.find_params(part, weight=True)
        scales_and_zeros.append((quantizer.scale, quantizer.zero))
    scales, zeros = (torch.cat(parts, 1) for parts in zip(*scales_and_zeros, strict=True))
    order = torch.arange(INPUTS)
    if fields["desc_act"]:
        order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
    linear, groups = nn.Linear(INPUTS, outputs, bias=False), torch.empty(INPUTS, dtype=torch.int32)
    linear.weight.data[:, order], groups[order] = weight, (torch.arange(INPUTS) // size).int()
    layer = TorchLinear(bits, group, in_features=INPUTS, out_features=outputs, **fields)
    scales = scales.half().float()  # as which they are stored
    pack = layer.pack_original if outputs % 32 else layer.pack  # which takes no other number
    pack(linear, scales, zeros, groups)
    layer.scales = layer.scales.float()
    dequantized = layer.eval().dequantize_weight().t().clone()
    layer.scales = layer.scales.half()
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, gptq_config)
    tensors = {f"{LAYER}.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return Case(f"gptqmodel {gptqmodel_version()}", gptqmodel_config(gptq_config), tensors, {LAYER: dequantized})


def gptqmodel_version() -> str:
    from gptqmodel.version import __version__

    return str(__version__)


def gptqmodel_config(config: Any) -> dict[str, Any]:
    """The quantization_config of config.json, without how the library computed."""
    return {name: value for name, value in json.loads(json.dumps(config.to_dict())).items() if name != "meta"}


def gptqmodel_awq_case(sym: bool) -> Case:
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    outputs, sizes = 8, {"bits": 4, "group_size": 32, "sym": sym, "desc_act": False}
    awq_config = QuantizeConfig(**sizes, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    linear = nn.Linear(INPUTS, outputs, bias=False)
    linear.weight.data = random_weight(outputs, torch.float16).float() if sym else full_range(outputs, 32)[0]
    _, scales, zeros = AWQProcessor.pseudo_quantize_tensor(types.SimpleNamespace(qcfg=awq_config), linear.weight.data)
    layer = AwqTorchLinear(**sizes, in_features=INPUTS, out_features=outputs, register_buffers=True)
    layer.pack(linear, scales.half(), zeros)
    tensors = {f"{LAYER}.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    dequantized = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, 32).t()
    return Case(f"gptqmodel {gptqmodel_version()}", gptqmodel_config(awq_config), tensors, {LAYER: dequantized})
