"""Layers as compressed-tensors compresses them, and the configuration that it writes."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from case import INPUTS, Case, Cases, full_range, llama, random_weight
from safetensors.torch import load_file
from torch import Tensor, nn

KV_SCALES = (".k_scale", ".v_scale")
IGNORED = ["lm_head", "re:.*self_attn", "re:.*(gate|up)_proj"]


def integers(bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **fields}


def floats(bits: int, strategy: str, **fields: Any) -> dict[str, Any]:
    return {**integers(bits, strategy, **fields), "type": "float"}


TOKENS, FP8_TOKENS = integers(8, "token", dynamic=True), floats(8, "token", dynamic=True)
OF_COMPRESSED_TENSORS: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None]] = {
    "int4 in groups": (8, integers(4, "group", group_size=32), None),
    "int4 per channel": (8, integers(4, "channel"), None),
    "int4 with zero points": (24, integers(4, "group", group_size=32, symmetric=False), None),
    "int4 per channel with zero points": (20, integers(4, "channel", symmetric=False), None),
    "int8 in groups": (8, integers(8, "group", group_size=32), None),
    "int8 per channel": (8, integers(8, "channel"), None),
    "int8 and int8 activations": (8, integers(8, "channel"), TOKENS),
    "fp8 per tensor": (8, floats(8, "tensor"), floats(8, "tensor")),
    "fp8 per channel": (8, floats(8, "channel"), FP8_TOKENS),
    "fp8 in blocks": (8, floats(8, "block", block_structure=[5, 32]), FP8_TOKENS),
    "mxfp4": (8, floats(4, "group", group_size=32, scale_dtype="torch.uint8"), None),
}
OLD_COMPRESSED_TENSORS: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None]] = {
    "int4 in the order of activations": (8, integers(4, "group", group_size=32, actorder="group"), None),
    "int4 with zero points, in the order of activations": (
        8,
        integers(4, "group", group_size=32, actorder="group", symmetric=False),
        None,
    ),
}


def parameters(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """The scales and zero points that compressed-tensors calculates from the extremes of each group of weights."""
    from compressed_tensors.quantization.utils import calculate_qparams

    match args.strategy:
        case "group":
            parts = weight.unflatten(1, (-1, args.group_size))
            low, high = parts.amin(2), parts.amax(2)
        case "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            rows, columns = args.block_structure
            padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
            parts = padded.view(padded.shape[0] // rows, rows, -1, columns)
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        case _:
            low, high = weight.amin().view(1), weight.amax().view(1)
    scale, zero = calculate_qparams(low, high, args)
    return {"weight_scale": scale, "weight_zero_point": zero}


def cases() -> Cases:
    ordered = importlib.util.find_spec("compressed_tensors.compressors.quantized_compressors") is not None
    for name, (outputs, weights, inputs) in (OLD_COMPRESSED_TENSORS if ordered else OF_COMPRESSED_TENSORS).items():
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        yield name, compressed(outputs, {"config_groups": {"group_0": scheme}, "ignore": IGNORED})
    if ordered:
        return
    four = {"targets": ["re:.*down_proj"], "weights": integers(4, "group", group_size=32)}
    eight = {"targets": ["re:.*o_proj"], "weights": floats(8, "channel"), "input_activations": FP8_TOKENS}
    yield "int4 and fp8", compressed(8, {"config_groups": {"group_0": four, "group_1": eight}, "ignore": ["lm_head"]})
    cache = {"kv_cache_scheme": floats(8, "tensor", dynamic=False)}
    case = compressed(8, {"config_groups": {"group_0": {**four, "targets": ["Linear"]}}, "ignore": IGNORED, **cache})
    scales = {name: tensor for name, tensor in case.tensors.items() if name.endswith(KV_SCALES)}
    yield "scales of keys and values", case._replace(tensors=scales, weights={})


def compressed(outputs: int, quantization: dict[str, Any]) -> Case:
    import compressed_tensors
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = llama(outputs)
    apply_quantization_config(model, QuantizationConfig(**quantization))
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and hasattr(layer, "quantization_scheme")
    }
    for layer in layers.values():
        set_parameters(layer)
    for name, tensor in model.named_parameters():
        if name.endswith(KV_SCALES):
            tensor.data.fill_(0.0371 if name.endswith("k_scale") else 0.0123)
    compressor = ModelCompressor.from_pretrained_model(model)
    with tempfile.TemporaryDirectory() as folder:
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
        stored = load_file(Path(folder) / "model.safetensors")
    for layer in layers.values():
        if layer.weight_scale.is_floating_point():  # in float32, a product of a weight and a scale is exact
            layer.weight_scale.data = layer.weight_scale.data.float()
    compressor.decompress_model(model)
    kept = [name for name in stored if name.startswith((*layers,)) or name.endswith(KV_SCALES)]
    library = f"compressed-tensors {compressed_tensors.__version__}"
    weights = {name: layer.weight.data for name, layer in layers.items()}
    return Case(library, config, {name: stored[name] for name in kept}, weights)


def set_parameters(layer: Any) -> None:
    """The weight of a layer to quantize, and how to, as a program that calibrates sets them."""
    args = layer.quantization_scheme.weights
    outputs, inputs = layer.weight.shape
    weight = random_weight(outputs)[:, :inputs]
    if not args.symmetric:
        weight = full_range(outputs, args.group_size or INPUTS)[0]
    tensors = parameters(weight, args)
    if args.actorder == "group":
        order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
        weight[:, order] = weight.clone()
        tensors["weight_g_idx"] = torch.empty(INPUTS, dtype=torch.int32)
        tensors["weight_g_idx"][order] = (torch.arange(INPUTS) // args.group_size).int()
    if hasattr(layer, "input_scale"):
        tensors["input_scale"] = torch.tensor([0.0312])
    for name, tensor in {"weight": weight, **tensors}.items():
        getattr(layer, name).data = tensor.to(getattr(layer, name).dtype)
