"""A small random model as a Hugging Face folder: configuration, weights, a tokenizer of bytes.

Every weight has the same value in float32, bfloat16 and float16, so that engines in any dtype run one model. It can
be written with 8-bit weights, too, as the tool modelslim does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from srv.quantization import modelslim
from srv.specs import ModelFacts

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
INPUT_STEP = 2.0**-5  # of a static layer's input, which reaches about 4
INPUT_OFFSET = 3.0
LEAST_WEIGHT = 2.0**-13  # smaller ones become 0: half precision has fewer digits for them than bfloat16
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_model(folder: Path, facts: ModelFacts) -> Path:
    """Write the model that the facts describe, if the folder does not hold it yet; gives the folder."""
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(facts.config)))
    weights = _weights(facts)
    if facts.quantization == modelslim.NAME:
        weights, kinds = quantized(weights)
        (folder / "quant_model_description.json").write_text(json.dumps(kinds))
    save_file(weights, folder / "model.safetensors")
    _write_tokenizer(folder)
    (folder / "done").touch()
    return folder


def _weights(facts: ModelFacts) -> dict[str, Tensor]:
    """Large enough that attention, rotation and every layer move the logits by much."""
    generator = torch.Generator().manual_seed(20)
    hidden, inner = facts.hidden_size, facts.config["intermediate_size"]
    rows, kv_rows = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim

    def matrix(outputs: int, inputs: int, gain: float = 1.3) -> Tensor:
        return _exact(torch.randn(outputs, inputs, generator=generator) * gain * inputs**-0.5)

    def norm() -> Tensor:
        return _exact(1.0 + 0.3 * torch.randn(hidden, generator=generator))

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
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights | {"model.norm.weight": norm(), "lm_head.weight": matrix(facts.vocab_size, hidden, gain=3.0)}


def quantized(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A checkpoint of modelslim and its description, from the float weights of a model without biases.

    Layers of even number are quantized dynamically, the others statically; what goes down, and all that is no layer,
    stays float. Inputs of static layers are given the range that the small model's activations have.
    """
    stored: dict[str, Tensor] = {}
    kinds = {"model_quant_type": modelslim.STATIC}
    for name, weight in weights.items():
        owner = name.removesuffix(".weight")
        if not owner.endswith("_proj") or owner.endswith("down_proj"):
            tensors, kind = {name: weight}, modelslim.FLOAT
        elif int(owner.split(".")[2]) % 2 == 0:
            tensors, kind = _dynamic(owner, weight), modelslim.DYNAMIC
        else:
            tensors, kind = _static(owner, weight), modelslim.STATIC
        stored |= tensors
        kinds |= dict.fromkeys(tensors, kind)
    return stored, kinds


def _dynamic(owner: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        f"{owner}.weight": (weight / scale).round().to(torch.int8),
        f"{owner}.weight_scale": scale,
        f"{owner}.weight_offset": torch.zeros_like(scale),
    }


def _static(owner: str, weight: Tensor) -> dict[str, Tensor]:
    tensors = _dynamic(owner, weight)
    whole, scale = tensors[f"{owner}.weight"], tensors[f"{owner}.weight_scale"][:, 0]
    input_scale, offset = torch.tensor([INPUT_STEP]), torch.tensor([INPUT_OFFSET])
    return {
        f"{owner}.weight": whole,
        f"{owner}.input_scale": input_scale,
        f"{owner}.input_offset": offset,
        f"{owner}.quant_bias": -(whole.int().sum(1) * int(offset)).int(),
        f"{owner}.deq_scale": scale * input_scale,
    }


def _exact(weight: Tensor) -> Tensor:
    """The nearest float32 values that bfloat16 and float16 hold exactly."""
    rounded = weight.to(torch.bfloat16).float()
    return torch.where(rounded.abs() < LEAST_WEIGHT, 0.0, rounded).contiguous()


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
