"""A checkpoint with random weights in a given shape, written in seconds: one random block, repeated.

Zeros would be faster to write, but products of zeros take less power and so less time than those of a real model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from speed_floors import Shape

CONTEXT = 16384
STD = 0.02
_BLOCK = 1 << 25  # elements


def write_checkpoint(folder: Path, shape: Shape, *, weights: bool = True) -> Path:
    """Write `config.json` and, with `weights`, `model.safetensors` in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
    if weights:
        with (folder / "model.safetensors").open("wb") as file:
            _write_tensors(file, dict(_tensors(shape)))
    return folder


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all weights, as published checkpoints have them."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, queries)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        for name in ("gate", "up"):
            yield f"{prefix}.mlp.{name}_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _write_tensors(file: BinaryIO, tensors: dict[str, tuple[int, ...]]) -> None:
    """The format of safetensors: the length of the header, the header, and the tensors one after the other."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    largest = max(torch.Size(shape).numel() for shape in tensors.values())
    block = torch.randn(min(_BLOCK, largest), generator=torch.Generator().manual_seed(0)).mul_(STD).bfloat16()
    for name, shape in tensors.items():
        count = torch.Size(shape).numel()
        if "norm" in name:
            _write(file, torch.ones(count, dtype=torch.bfloat16))
            continue
        for start in range(0, count, len(block)):
            _write(file, block[: count - start])


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    file.write(memoryview(tensor.view(torch.uint8).numpy()))
