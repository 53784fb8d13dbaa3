"""Small checkpoints of bitsandbytes, written by the format's description."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models_small import edit_config, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.quantization.formats.bitsandbytes_storage import TABLES

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
PROJECTION = re.compile(r"_proj\.weight$")


class Form(NamedTuple):
    """kind: "nf4", "fp4" or "int8". block: weights per scale. stored: the dtype that codes are viewed as."""

    kind: str = "nf4"
    block: int = 64
    nested: bool = False
    stored: torch.dtype = torch.uint8

    @property
    def config(self) -> dict[str, Any]:
        eight = self.kind == "int8"
        fields = {"quant_method": "bitsandbytes", "load_in_4bit": not eight, "load_in_8bit": eight}
        return {**fields, "bnb_4bit_quant_type": "fp4" if eight else self.kind, "llm_int8_skip_modules": None}


def packed(name: str, weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and its weights as they are then."""
    if form.kind == "int8":
        largest = weight.abs().amax(1)
        values = (weight / largest[:, None] * 127).round().to(torch.int8)
        tensors = {f"{name}.weight": values, f"{name}.SCB": largest}
        tensors[f"{name}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return tensors, values.float() * largest[:, None] / 127
    table, flat = torch.tensor(TABLES[form.kind]), weight.reshape(-1, form.block)
    scales = flat.abs().amax(1)
    extra: dict[str, Tensor] = {"absmax": scales, "quant_map": table}
    state: dict[str, Any] = {"quant_type": form.kind, "blocksize": form.block, "shape": list(weight.shape)}
    if form.nested:
        levels, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        outer = torch.stack([part.abs().amax() for part in (scales - offset).split(256)])
        chosen = ((scales - offset) / outer.repeat_interleave(256)[: len(scales)])[:, None] - levels
        codes = chosen.abs().argmin(1)
        scales = levels[codes] * outer.repeat_interleave(256)[: len(scales)] + offset
        extra |= {"absmax": codes.to(torch.uint8), "nested_absmax": outer, "nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    codes = ((flat / scales[:, None])[..., None] - table).abs().argmin(-1)
    both = codes.view(-1, 2)
    extra[f"quant_state.bitsandbytes__{form.kind}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored = ((both[:, 0] << 4) | both[:, 1]).to(torch.uint8).view(form.stored)[:, None]
    tensors = {f"{name}.weight": stored, **{f"{name}.weight.{suffix}": part for suffix, part in extra.items()}}
    return tensors, (table[codes] * scales[:, None]).view(weight.shape)


def write(
    folder: Path, form: Form, spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None, **fields: Any
) -> Any:
    """A checkpoint. Returns a model of transformers with the same weights in float32."""
    model = small_model("llama", **{**SIZES, **fields})
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if PROJECTION.search(name):
            tensors, plain = packed(name.removesuffix(".weight"), stored.pop(name), form)
            stored |= tensors
            with torch.no_grad():
                parameter.copy_(plain)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=form.config)
    return model


FORMS = {
    "nf4": Form(),
    "fp4": Form("fp4"),
    "nf4 in larger blocks with nested scales": Form(block=128, nested=True),
    "fp4 with nested scales, stored as bfloat16": Form("fp4", nested=True, stored=torch.bfloat16),
    "int8": Form("int8"),
}
