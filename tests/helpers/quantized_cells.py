"""A small checkpoint of any class with native layers in any quantization method, for tests of whole platforms.

The models are those of `bfloat16_models`. Linear layers are stored as tools store them: one by one, also those of
experts, and without the output layer, routers, and layers that have no whole groups of inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import mixed_weights
import torch
from models_small import edit_config
from mxfp4_weights import save_mxfp4_experts
from safetensors.torch import load_file, save_file
from stored_orders import Stored, each_expert, stored_form
from torch import Tensor

_INT8 = mixed_weights.of_int8()


class Method(NamedTuple):
    """How a method stores layers. `inputs`: which a layer must have a multiple of. `left_out`: names of further layers
    that stay unquantized. `allowed`: as in `assert_as_close_as_transformers`, more where kernels round activations to 8
    bits as well."""

    form: Stored
    inputs: int = 1
    left_out: str = "^$"
    allowed: float = 6.0


def _modelslim(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, plain = _INT8.stored(layer, weight)
    scale = tensors[f"{layer}.weight_scale"]
    return {**tensors, f"{layer}.weight_offset": torch.zeros_like(scale)}, plain


UP_PROJECTION, EXPERTS = r"\.kv_b_proj\.", r"\.experts\."


METHODS = {
    "awq": Method(stored_form("awq"), 32),
    "gptq": Method(stored_form("gptq"), 32),
    "compressed-tensors": Method(stored_form("compressed-tensors"), 32),
    "w8a8_int8": Method(Stored(_INT8.stored, mixed_weights.config_of({("Linear",): _INT8}, "int-quantized"))),
    "fp8": Method(stored_form("compressed-tensors, channel"), allowed=2.0),
    "bitsandbytes": Method(stored_form("bitsandbytes nf4"), 64, f"{UP_PROJECTION}|{EXPERTS}"),
    "torchao": Method(stored_form("torchao"), left_out=f"{UP_PROJECTION}|{EXPERTS}", allowed=2.0),
    "modelslim": Method(Stored(_modelslim, {"model_quant_type": "W8A8_DYNAMIC"}), left_out=UP_PROJECTION),
}
MXFP4 = "mxfp4"  # of gpt-oss, whose experts alone are quantized
_NO_PRODUCT = re.compile(r"(lm_head|embed_out|embed_in|embed_\w+|\w*embeddings|wte|wpe)\.weight$")
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
_LEAST = 16  # outputs: routers and gates have fewer


def write_quantized(folder: Path, model: Any, method: str) -> Any:
    """Write a model of transformers as a bfloat16 checkpoint of a method. Returns it with the weights as they are then.

    `model` keeps its own weights. "mxfp4": of gpt-oss only.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if method == MXFP4:
        same = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        save_mxfp4_experts(same, folder, torch.bfloat16, lowest=-7)
        return same.eval()
    how = METHODS[method]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        tensors, plain[name] = _stored(name, tensor, how, model.config.model_type)
        stored |= tensors
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, file, {"format": "pt"})
    same = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file, {"format": "pt"})
    edit_config(folder, quantization_config=_config(method, how, stored), dtype="bfloat16")
    return same.eval()


def _config(method: str, how: Method, stored: dict[str, Tensor]) -> dict[str, Any]:
    """modelslim's states the type of each tensor."""
    if method != "modelslim":
        return how.form.config
    quantized = {name: f"{name}_scale" in stored for name in stored if name.endswith(".weight")}
    return {
        **how.form.config,
        **{name: "W8A8_DYNAMIC" if is_quantized else "FLOAT" for name, is_quantized in quantized.items()},
    }


def _stored(name: str, tensor: Tensor, how: Method, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a weight, and the weight as it is then. `kind`: the type of the model."""
    turned = kind == "gpt2"  # its weights are [in, out]
    experts = _FUSED_EXPERTS.match(name)
    if experts is not None and not re.search(how.left_out, name):
        return each_expert(how.form.quantize, experts[1], experts[2], tensor, in_turn=kind == "gpt_oss")
    rows = tensor.t().contiguous() if turned and tensor.ndim == 2 else tensor
    if not _is_quantized(name, rows, how):
        return {name: tensor.to(torch.bfloat16)}, tensor
    tensors, weight = how.form.quantize(name.removesuffix(".weight"), rows)
    return tensors, weight.t() if turned else weight


def _is_quantized(name: str, rows: Tensor, how: Method) -> bool:
    if rows.ndim != 2 or not name.endswith(".weight") or _NO_PRODUCT.search(name):
        return False
    fits = rows.shape[0] >= _LEAST and rows.shape[1] % how.inputs == 0
    return fits and re.search(how.left_out, name) is None
