"""Write a GGUF file of random weights in Qwen3-30B-A3B's proportions: Q4_0, about a billion parameters.

Owns the sizes and names of its tensors. The tokenizer is the demo model's, so that servers load the file as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

ARCHITECTURE = "qwen3moe"
STD = 0.03  # of the weights


@dataclass(frozen=True)
class MoESizes:
    """The sizes of a Qwen3-MoE model. `intermediate`: of one expert. `vocab`: that of the tokenizer's model."""

    layers: int = 12
    hidden: int = 1024
    intermediate: int = 384
    experts: int = 64
    top_k: int = 8
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128

    def matrices(self, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, outermost axis first, of the matrices that are stored as Q4_0."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (vocab, self.hidden)
        for layer in range(self.layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_q.weight", (query, self.hidden)
            yield f"{block}.attn_k.weight", (key, self.hidden)
            yield f"{block}.attn_v.weight", (key, self.hidden)
            yield f"{block}.attn_output.weight", (self.hidden, query)
            yield f"{block}.ffn_gate_exps.weight", (self.experts, self.intermediate, self.hidden)
            yield f"{block}.ffn_up_exps.weight", (self.experts, self.intermediate, self.hidden)
            yield f"{block}.ffn_down_exps.weight", (self.experts, self.hidden, self.intermediate)

    def norms(self) -> Iterator[tuple[str, int]]:
        yield "output_norm.weight", self.hidden
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", self.hidden
            yield f"blk.{layer}.ffn_norm.weight", self.hidden
            yield f"blk.{layer}.attn_q_norm.weight", self.head_dim
            yield f"blk.{layer}.attn_k_norm.weight", self.head_dim


def write(path: Path, tokenizer: Path, sizes: MoESizes | None = None, seed: int = 1) -> None:
    """Write the file, with the tokenizer of another GGUF file; the output layer is the embedding."""
    sizes, random = sizes or MoESizes(), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    vocab = _copy_tokenizer(writer, tokenizer)
    _add_sizes(writer, sizes)
    for name, size in sizes.norms():
        writer.add_tensor(name, np.ones(size, dtype=np.float32))
    for layer in range(sizes.layers):
        router = random.normal(0, STD, (sizes.experts, sizes.hidden)).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    for name, shape in sizes.matrices(vocab):
        writer.add_tensor(name, _blocks(random, shape), raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, sizes: MoESizes) -> None:
    writer.add_block_count(sizes.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(3 * sizes.hidden)  # of layers without experts: there are none
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(sizes.top_k)
    writer.add_expert_feed_forward_length(sizes.intermediate)


def _copy_tokenizer(writer: gguf.GGUFWriter, tokenizer: Path) -> int:
    """Copy the fields of a file's tokenizer; returns the size of its vocabulary."""
    vocab = 0
    for key, field in gguf.GGUFReader(str(tokenizer)).fields.items():
        if key.startswith("tokenizer."):
            parts = field.types
            writer.add_key_value(key, field.contents(), parts[0], parts[1] if len(parts) > 1 else None)
            vocab = len(field.data) if key == "tokenizer.ggml.tokens" else vocab
    return vocab


def _blocks(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random Q4_0 blocks: a scale in half precision, then 32 weights of 4 bits, which are from -8 to 7 scales."""
    elements, size = gguf.GGML_QUANT_SIZES[Kind.Q4_0]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(STD / 4.61).tobytes(), dtype=np.uint8)
    return blocks.reshape(*shape[:-1], -1)
