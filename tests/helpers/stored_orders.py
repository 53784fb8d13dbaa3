"""Small quantized checkpoints of architectures that fuse matrices, or order their rows otherwise than the layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes_weights
import deepseek_small
import fp8_weights
import mixed_weights
import packed_weights
import torch
from models_small import edit_config, randomized
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    Phi3Config,
)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 97}
SIZES |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.25}
SIZES |= {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "phi3": lambda: Phi3Config(**SIZES, original_max_position_embeddings=256),
    "glm4": lambda: Glm4Config(**SIZES, head_dim=16, attention_bias=True),
    "cohere": lambda: CohereConfig(**SIZES, use_qk_norm=True),
    "llama4": lambda: Llama4TextConfig(
        **{**SIZES, **EXPERTS, "num_experts_per_tok": 1}, head_dim=16, intermediate_size_mlp=96
    ),
    "gpt_oss": lambda: GptOssConfig(**SIZES, **EXPERTS, head_dim=16),
    "neox": lambda: GPTNeoXConfig(**SIZES, rotary_pct=0.5, attention_bias=True),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=256, n_inner=96),
    "falcon": lambda: FalconConfig(
        **{**SIZES, "num_hidden_layers": 2}, new_decoder_architecture=True, num_kv_heads=2, bias=False, alibi=False
    ),
}
# Sizes of whole groups of 32 inputs. The rotary rows of a head are the second half of 32, or the first half.
DEEPSEEK = {"qk_nope_head_dim": 16, "qk_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 16, "num_attention_heads": 4}
DEEPSEEK |= {"num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
DEEPSEEK |= {"q_lora_rank": 32, "num_hidden_layers": 2}
LINEAR = re.compile(
    r"(_proj|_proj_with_mqa|\.query_key_value|\.dense|\.dense_h_to_4h|\.dense_4h_to_h|\.c_attn|\.c_fc|\.c_proj"
    r"|\.w[123]|\.fc[12])\.weight$"
)
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")

Quantize = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


class Stored(NamedTuple):
    """How layers are stored, by the name of a layer and its weights (`quantize`), and the quantization_config."""

    quantize: Quantize
    config: dict[str, Any]


def stored_form(name: str) -> Stored:
    """A form of `packed_weights` or `fp8_weights`, "int8" (of weights only), or "bitsandbytes nf4" and the like."""
    if name == "int8":
        group = mixed_weights.of_int8()
        group = group._replace(fields={**group.fields, "input_activations": None})
        return Stored(group.stored, mixed_weights.config_of({("Linear",): group}, "int-quantized"))
    if name.startswith("bitsandbytes"):
        bits = bitsandbytes_weights.Form(name.rpartition(" ")[2])
        return Stored(lambda layer, weight: bitsandbytes_weights.packed(layer, weight, bits), bits.config)
    if name in packed_weights.FORMS:
        packed = packed_weights.FORMS[name]
        return Stored(lambda layer, weight: packed_weights.packed(layer, weight, packed), packed.config)
    form = fp8_weights.FORMS[name]

    def quantize(layer: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, scale, plain = fp8_weights.quantized(weight, form)
        more = {f"{layer}.{suffix}": torch.tensor(value) for suffix, value in form.extra.items()}
        return {f"{layer}.{form.weight}": values, f"{layer}.{form.suffix}": scale, **more}, plain

    assert form.config is not None
    return Stored(quantize, form.config)


def made(kind: str, **fields: Any) -> Any:
    """A random model of transformers. `fields`: of its configuration."""
    if kind in deepseek_small.MODELS:
        return deepseek_small.small(kind, **{**DEEPSEEK, **fields})
    config = CONFIGS[kind]()
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def write_stored(
    folder: Path,
    model: Any,
    form: Stored,
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    ignore: str = "",
) -> Any:
    """A checkpoint of `model` in this form. Returns a model of transformers with the same weights in float32.

    `ignore`: a regular expression of layers that stay unquantized.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        left = bool(ignore) and re.search(ignore, name) is not None
        experts = _FUSED_EXPERTS.match(name)
        if LINEAR.search(name) and not left:
            turned = ".c_" in name  # GPT-2's are [in, out], except for packed integers
            tensors, plain = form.quantize(name.removesuffix(".weight"), tensor.t().contiguous() if turned else tensor)
            same[name] = plain.t() if turned else plain
            stored |= tensors
        elif experts is not None and not left:
            in_turn = model.config.model_type == "gpt_oss"
            tensors, same[name] = each_expert(form.quantize, experts[1], experts[2], tensor, in_turn)
            stored |= tensors
        else:
            stored[name] = tensor.half()
            same[name] = stored[name].float()
    save_file({name: tensor.contiguous() for name, tensor in same.items()}, file, {"format": "pt"})
    model = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    edit_config(folder, quantization_config=form.config)
    return model.eval()


def each_expert(
    quantize: Quantize, prefix: str, kind: str, fused: Tensor, in_turn: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The linear layers of each expert, as tools store them, and the tensor of all [E, in, out] as it is then.

    `in_turn`: the columns of gate and up projection are.
    """
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    tensors: dict[str, Tensor] = {}
    plain = []
    count = len(parts)
    for expert, columns in enumerate(fused):
        divided = [columns[:, part::count] for part in range(count)] if in_turn else columns.chunk(count, 1)
        rows = [
            quantize(f"{prefix}.{expert}.{part}", piece.t().contiguous())
            for part, piece in zip(parts, divided, strict=True)
        ]
        for row_tensors, _ in rows:
            tensors |= row_tensors
        same = [weight.t() for _, weight in rows]
        plain.append(torch.stack(same, 2).flatten(1) if in_turn else torch.cat(same, 1))
    return tensors, torch.stack(plain)
