"""Small checkpoints with packed integers, written by the descriptions of AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models_small import edit_config, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
PROJECTION = re.compile(r"(_proj|\.w[123])\.weight$")
AWQ_COLUMNS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}  # the output that each field of a word belongs to


class Form(NamedTuple):
    """One form of checkpoints. `config`: its quantization_config."""

    method: str
    config: dict[str, Any]
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    stored_less: int = 0  # what is subtracted from stored zeros
    awq_in_order: bool = False
    indexed: bool = True  # GPTQ, with a tensor of the groups of inputs


def compressed(bits: int = 4, group: int = 32, symmetric: bool = True, actorder: str | None = None) -> Form:
    weights = {
        **{"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"},
        **{"group_size": group or None, "actorder": actorder},
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return Form("compressed-tensors", {**config, "ignore": ["lm_head"]}, bits, group, symmetric, actorder == "group")


def gptq(bits: int = 4, group: int = 32, form: str = "gptq", less: int = 1, **fields: Any) -> Form:
    gptq_config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": True,
        "desc_act": False,
        **fields,
    }
    config = {**gptq_config, "checkpoint_format": form}
    return Form("gptq", config, bits, group, gptq_config["sym"], gptq_config["desc_act"], less)


def auto_round(packing: str, **fields: Any) -> dict[str, Any]:
    stated = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "group_size": 32}
    left_out = {"lm_head": {"bits": 16, "data_type": "float"}}
    return {**stated, "sym": True, "data_type": "int", "extra_config": left_out, **fields}


AWQ = Form(
    "awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, 4, 32, False
)
FORMS = {
    "awq": AWQ,
    "awq, old names": AWQ._replace(config={"quant_method": "AWQ", "w_bit": "4", "q_group_size": "32"}),
    "awq without zero points": AWQ._replace(config={**AWQ.config, "zero_point": False}, symmetric=True),
    "awq of 8 bits": AWQ._replace(config={**AWQ.config, "bits": 8, "zero_point": False}, bits=8, symmetric=True),
    "awq of 8 bits by GPTQModel": AWQ._replace(
        config={**AWQ.config, "bits": 8, "zero_point": False, "meta": {"quantizer": ["gptqmodel:5.8.0"]}},
        bits=8,
        symmetric=True,
        awq_in_order=True,
    ),
    "gptq": gptq(),
    "auto-round": gptq()._replace(config=auto_round("auto_gptq"), indexed=False),
    "auto-round with zeros": gptq(sym=False)._replace(config=auto_round("auto_gptq", sym=False), indexed=False),
    "auto-round as awq": AWQ._replace(config=auto_round("auto_awq", sym=False)),
    "gptq with zeros": gptq(sym=False),
    "gptq v2 with zeros": gptq(sym=False, form="gptq_v2", less=0),
    "gptq that is v2 and does not say so": gptq(less=0),
    "gptq of one group": gptq(group=0),
    "gptq in another order": gptq(desc_act=True),
    "gptq with zeros in another order": gptq(sym=False, desc_act=True),
    "gptq of 8 bits": gptq(bits=8),
    "compressed-tensors": compressed(),
    "compressed-tensors with zeros": compressed(symmetric=False),
    "compressed-tensors of one group": compressed(group=0),
    "compressed-tensors in another order": compressed(actorder="group"),
    "compressed-tensors of 8 bits": compressed(bits=8),
}


def words(fields: Tensor, bits: int) -> Tensor:
    """Integers [..., n] -> int32 words [..., n * bits / 32], the lowest bits first."""
    per_word = 32 // bits
    parts = fields.long().unflatten(-1, (-1, per_word)) << torch.arange(0, 32, bits)
    total = parts.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


_shuffled: ContextVar[bool] = ContextVar("shuffled", default=False)


@contextmanager
def shuffled_by_name(by_name: bool) -> Iterator[None]:
    """Write orders of inputs that differ between blocks and experts, if `by_name`, or only by the number of inputs."""
    token = _shuffled.set(by_name)
    try:
        yield
    finally:
        _shuffled.reset(token)


_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def exact_formula() -> Iterator[None]:
    """Weights are those of the format, not those of the blocks which layers hold them as."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


def packed(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a quantized layer, and its weights as they are then."""
    outputs, inputs = weight.shape
    size, middle, top = form.group or inputs, 2 ** (form.bits - 1), 2**form.bits - 1
    groups = inputs // size
    order = torch.arange(inputs) // size
    if form.ordered:
        seed = inputs + _shuffled.get() * (zlib.crc32(name.rpartition(".")[0].encode()) & 0xFFFF)
        seed += 1 << 20 if name.endswith("down_proj") else 0
        order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    columns = order.argsort(stable=True)
    grouped = weight[:, columns].unflatten(1, (groups, size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    spread = 2 * torch.maximum(high, -low) if form.symmetric else high - low
    scale = (spread / top).half().float()
    zero = torch.full((outputs, groups), middle) if form.symmetric else (-low / scale).round().clamp(1, top).long()
    values = torch.empty_like(weight, dtype=torch.long)
    values[:, columns] = ((grouped / scale[..., None]).round().long() + zero[..., None]).clamp(0, top).flatten(1)
    base = (-scale * zero).half().float()  # blocks hold it in float16: a rounding of at most 0.8 % of a step
    assert bool(((base + scale * zero).abs() <= scale / 128).all())
    if _exact.get() or name.endswith("kv_b_proj"):  # which is dequantized
        base = -scale * zero
    plain = values * scale[:, order] + base[:, order]
    scales, stored_zeros = scale.half(), (zero - form.stored_less) & top
    match form.method:
        case "awq":
            per_word = 32 // form.bits
            fields = tuple(range(per_word)) if form.awq_in_order else AWQ_COLUMNS[form.bits]
            turned = (
                tensor.t().unflatten(1, (-1, per_word))[..., fields].flatten(1) for tensor in (values, stored_zeros)
            )
            tensors = dict(zip(("qweight", "qzeros"), (words(tensor, form.bits) for tensor in turned), strict=True))
            tensors["scales"] = scales.t()
        case "gptq":
            tensors = {
                "qweight": words(values, form.bits).t(),
                "qzeros": words(stored_zeros.t(), form.bits),
                "scales": scales.t(),
            }
            tensors |= {"g_idx": order.int()} if form.indexed else {}
        case _:
            tensors = {"weight_packed": words(values, form.bits), "weight_scale": scales}
            tensors["weight_shape"] = torch.tensor(weight.shape)
            if not form.symmetric:
                tensors["weight_zero_point"] = words(zero.t(), form.bits).t()
            if form.ordered:
                tensors["weight_g_idx"] = order.int()
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}, plain


def write_packed(
    folder: Path,
    form: Form,
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    kind: str = "llama",
    **fields: Any,
) -> Any:
    """A checkpoint of this form. Returns a model of transformers with the same weights in float32.

    kind, fields: as of `small_model`.
    """
    unquantized = small_model(kind, **{**SIZES, **fields})
    unquantized.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if PROJECTION.search(name):
            tensors, same[name] = packed(name.removesuffix(".weight"), tensor, form)
            stored |= tensors
        else:
            stored[name] = tensor.half()
            same[name] = stored[name].float()
    save_file(same, file, {"format": "pt"})
    model = type(unquantized).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    spoil(stored)
    save_file(stored, file)
    edit_config(folder, quantization_config=form.config)
    return model.eval()
