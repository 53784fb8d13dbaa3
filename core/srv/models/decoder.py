"""The native decoder: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 as one stack with switches.

Owns the order of computation and the names that checkpoints give to its weights. Must not know files,
devices or the KV pool.

    token ─ embedding ─┬─ norm ─ qkv ─ [head norms] ─ rotary ─ attend ─ output ─(+)─┬─ norm ─ MLP ─(+)─ … ─ norm
                       └──────────────────── residual ───────────────────────────┘ └──── residual ──┘
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from srv.models.base import Attend, CausalLM
from srv.models.decoder_config import DecoderConfig
from srv.models.layers import Embedding, GatedMLP, Linear, Place, RMSNorm
from srv.models.rope import cos_sin_table
from srv.platform.interface import AttentionLayer, OpArgs


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries, keys and values come from one matrix."""

    def __init__(self, config: DecoderConfig, place: Place, index: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        self.layer = AttentionLayer(index, heads, kv_heads, dim, dim**-0.5, config.windows[index])
        self.sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.qkv = Linear(place, config.hidden_size, sum(self.sizes), config.qkv_bias)
        self.output = Linear(place, heads * dim, config.hidden_size, config.output_bias)
        self.query_norm = self.key_norm = None
        if config.head_norms:
            self.query_norm = RMSNorm(place, dim, config.norm_eps, with_residual=False)
            self.key_norm = RMSNorm(place, dim, config.norm_eps, with_residual=False)
        sizes = {"head_dim": dim, "rotary_dim": config.rope.dim}
        self._rotate: Callable[..., tuple[Tensor, Tensor]] = place.ops.bind("rotary", OpArgs(place.dtype, sizes))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden]."""
        layer = self.layer
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm(q.reshape(-1, layer.head_dim))
            k = self.key_norm(k.reshape(-1, layer.head_dim))
        q = q.reshape(-1, layer.heads, layer.head_dim)
        k = k.reshape(-1, layer.kv_heads, layer.head_dim)
        v = v.reshape(-1, layer.kv_heads, layer.head_dim)
        q, k = self._rotate(q, k, cos_sin, positions)
        attended = attend(layer, q, k, v)
        projected: Tensor = self.output(attended.reshape(-1, layer.heads * layer.head_dim))
        return projected


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, each added to the residual (which the next norm adds)."""

    def __init__(self, config: DecoderConfig, place: Place, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(place, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, place, index)
        self.mlp_norm = RMSNorm(place, config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(place, config.hidden_size, config.intermediate_size, config.mlp_bias)


class Decoder(CausalLM):
    """A whole model, its weights still to be filled through `targets`."""

    def __init__(self, config: DecoderConfig, place: Place, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(place, config.vocab_size, config.hidden_size)
        self.stack = tuple(DecoderLayer(config, place, index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(place, config.hidden_size, config.norm_eps)
        shared = self.embedding.weight if config.tied else None
        self.head = Linear(place, config.hidden_size, config.vocab_size, bias=False, weight=shared)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", cos_sin_table(config.rope, context_length).to(place.device), persistent=False)
        self.attention_layers = tuple(layer.attention.layer for layer in self.stack)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        residual: Tensor = self.embedding(tokens)
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm(residual)
            else:
                normed, residual = layer.attention_norm.add(x, residual)
            attended = layer.attention(normed, positions, self.cos_sin, attend)
            normed, residual = layer.mlp_norm.add(attended, residual)
            x = layer.mlp(normed)
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(hidden)
        return scores

    def targets(self) -> dict[str, Tensor]:
        """Views of all weights by the names that Hugging Face checkpoints give them; fused ones are slices."""
        named: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tied:
            named["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.stack):
            prefix = f"model.layers.{index}."
            named |= {prefix + name: view for name, view in _layer_targets(layer).items()}
        return named


def _layer_targets(layer: DecoderLayer) -> dict[str, Tensor]:
    attention, mlp = layer.attention, layer.mlp
    named: dict[str, Tensor] = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
    }
    named |= _slices("self_attn", attention.qkv, ("q_proj", "k_proj", "v_proj"), attention.sizes)
    named |= _slices("self_attn", attention.output, ("o_proj",), [attention.output.out_features])
    if attention.query_norm is not None and attention.key_norm is not None:
        named["self_attn.q_norm.weight"] = attention.query_norm.weight
        named["self_attn.k_norm.weight"] = attention.key_norm.weight
    half = mlp.gate_up.out_features // 2
    named |= _slices("mlp", mlp.gate_up, ("gate_proj", "up_proj"), [half, half])
    named |= _slices("mlp", mlp.down, ("down_proj",), [mlp.down.out_features])
    return named


def _slices(prefix: str, linear: Linear, names: tuple[str, ...], rows: list[int]) -> dict[str, Tensor]:
    """Consecutive rows of a fused matrix (and of its bias), one entry a part."""
    named: dict[str, Tensor] = {}
    start = 0
    for name, count in zip(names, rows, strict=True):
        named[f"{prefix}.{name}.weight"] = linear.weight.narrow(0, start, count)
        if linear.bias is not None:
            named[f"{prefix}.{name}.bias"] = linear.bias.narrow(0, start, count)
        start += count
    return named
