"""A small random model as a Hugging Face folder: configuration, weights and a byte tokenizer.

Every weight has the same value in float32, bfloat16 and float16, so that engines in any dtype run the same model. It
can also be written with 8-bit weights, in the format of modelslim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from srv.quantization.formats import modelslim
from srv.specs import ModelFacts

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
INPUT_SCALE = 2.0**-5  # of statically quantized inputs, whose magnitudes reach about 4
INPUT_OFFSET = 3.0
MIN_WEIGHT = 2.0**-13  # smaller ones become 0, because float16 has fewer bits for them than bfloat16
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_model(folder: Path, facts: ModelFacts) -> Path:
    """Write the model with these facts unless the folder contains it already (its file `done` is the last that is
    written); return the folder."""
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(facts.config)))
    weights = _weights(facts)
    if facts.quantization == modelslim.NAME:
        weights, types = quantize_weights(weights)
        (folder / "quant_model_description.json").write_text(json.dumps(types))
    save_file(weights, folder / "model.safetensors")
    _write_tokenizer(folder)
    (folder / "done").touch()
    return folder


def _weights(facts: ModelFacts) -> dict[str, Tensor]:
    """Weights so large that attention, rotary embedding and every layer change the logits visibly."""
    generator = torch.Generator().manual_seed(20)
    hidden, inner = facts.hidden_size, facts.config["intermediate_size"]
    rows, kv_rows = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim

    def matrix(outputs: int, inputs: int, gain: float = 1.3) -> Tensor:
        return _exact_in_16_bits(torch.randn(outputs, inputs, generator=generator) * gain * inputs**-0.5)

    def norm() -> Tensor:
        return _exact_in_16_bits(1.0 + 0.3 * torch.randn(hidden, generator=generator))

    weights = {"model.embed_tokens.weight": matrix(facts.vocab_size, hidden, gain=hidden**0.5)}
    for index in range(facts.layers):
        prefix = f"model.layers.{index}."
        weights |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(rows, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, rows),
            prefix + "post_attention_layernorm.weight": norm(),
        }
        experts = facts.config.get("num_local_experts", 0)
        mlps = [f"{prefix}block_sparse_moe.experts.{expert}." for expert in range(experts)] or [f"{prefix}mlp."]
        gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
        for mlp in mlps:
            weights |= {
                f"{mlp}{gate}.weight": matrix(inner, hidden),
                f"{mlp}{up}.weight": matrix(inner, hidden),
                f"{mlp}{down}.weight": matrix(hidden, inner),
            }
        if experts:  # its logits are far apart, so that rounding changes the choice of unimportant experts only
            weights[f"{prefix}block_sparse_moe.gate.weight"] = matrix(experts, hidden, gain=6.0)
    return weights | {"model.norm.weight": norm(), "lm_head.weight": matrix(facts.vocab_size, hidden, gain=3.0)}


def quantize_weights(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A modelslim checkpoint and its description, from the float weights of a model without biases.

    Even layers use dynamic quantization, odd layers static; down projections and weights outside the layers stay
    float. Static input scales fit the range of the small model's activations.
    """
    stored: dict[str, Tensor] = {}
    types = {"model_quant_type": modelslim.STATIC}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj") or layer.endswith("down_proj"):
            tensors, quant_type = {name: weight}, modelslim.FLOAT
        elif int(layer.split(".")[2]) % 2 == 0:
            tensors, quant_type = _dynamic(layer, weight), modelslim.DYNAMIC
        else:
            tensors, quant_type = _static(layer, weight), modelslim.STATIC
        stored |= tensors
        types |= dict.fromkeys(tensors, quant_type)
    return stored, types


def _dynamic(layer: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        f"{layer}.weight": (weight / scale).round().to(torch.int8),
        f"{layer}.weight_scale": scale,
        f"{layer}.weight_offset": torch.zeros_like(scale),
    }


def _static(layer: str, weight: Tensor) -> dict[str, Tensor]:
    tensors = _dynamic(layer, weight)
    quantized, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"][:, 0]
    input_scale, offset = torch.tensor([INPUT_SCALE]), torch.tensor([INPUT_OFFSET])
    return {
        f"{layer}.weight": quantized,
        f"{layer}.input_scale": input_scale,
        f"{layer}.input_offset": offset,
        f"{layer}.quant_bias": -(quantized.int().sum(1) * int(offset)).int(),
        f"{layer}.deq_scale": scale * input_scale,
    }


def _exact_in_16_bits(weight: Tensor) -> Tensor:
    """The nearest values that bfloat16 and float16 represent exactly, as float32."""
    rounded = weight.to(torch.bfloat16).float()
    return torch.where(rounded.abs() < MIN_WEIGHT, 0.0, rounded).contiguous()


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, after the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
