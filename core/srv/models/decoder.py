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
from srv.models.layers import GatedMLP, Projection, RMSNorm, Weights
from srv.models.rope import cos_sin_table
from srv.platform.interface import AttentionLayer, OpArgs


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries, keys and values come from one matrix."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, index: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        self.layer = AttentionLayer(index, heads, kv_heads, dim, dim**-0.5, config.windows[index])
        self.heads, self.all_heads = [heads, kv_heads, kv_heads], heads + 2 * kv_heads
        names = (f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        place = weights.place
        parts = {name: count * dim for name, count in zip(names, self.heads, strict=True)}
        self.qkv = weights.linear(parts, config.hidden_size, config.qkv_bias)
        self.output = weights.linear({f"{prefix}.o_proj": config.hidden_size}, heads * dim, config.output_bias)
        self.query_norm = self.key_norm = None
        if config.head_norms:
            self.query_norm = RMSNorm(place, dim, config.norm_eps, with_residual=False)
            self.key_norm = RMSNorm(place, dim, config.norm_eps, with_residual=False)
        sizes = {"head_dim": dim, "rotary_dim": config.rope.dim}
        self._rotate: Callable[..., tuple[Tensor, Tensor]] = place.ops.bind("rotary", OpArgs(place.dtype, sizes))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden]."""
        layer = self.layer
        heads = self.qkv.kernel(x).reshape(-1, self.all_heads, layer.head_dim)
        q, k, v = heads.split_with_sizes(self.heads, 1)
        if self.query_norm is not None and self.key_norm is not None:
            q = self.query_norm.forward(q.reshape(-1, layer.head_dim)).view(-1, layer.heads, layer.head_dim)
            k = self.key_norm.forward(k.reshape(-1, layer.head_dim)).view(-1, layer.kv_heads, layer.head_dim)
        q, k = self._rotate(q, k, cos_sin, positions)
        attended = attend(layer, q, k, v)
        return self.output.kernel(attended.reshape(-1, layer.heads * layer.head_dim))


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, each added to the residual (which the next norm adds)."""

    def __init__(self, config: DecoderConfig, weights: Weights, index: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(weights.place, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, weights, f"{self.prefix}.self_attn", index)
        self.mlp_norm = RMSNorm(weights.place, config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            weights, f"{self.prefix}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias
        )

    def targets(self) -> dict[str, Tensor]:
        """Views of this layer's weights, by the checkpoint's names."""
        attention, mlp = self.attention, self.mlp
        norms = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
            "self_attn.q_norm": attention.query_norm,
            "self_attn.k_norm": attention.key_norm,
        }
        targets: dict[str, Tensor] = {
            f"{self.prefix}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None
        }
        for projection in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            targets |= projection.targets()
        return targets


class Decoder(CausalLM):
    """A whole model, its weights still to be filled through `targets`. `weights` makes what holds them."""

    def __init__(self, config: DecoderConfig, weights: Weights, context_length: int) -> None:
        super().__init__()
        self.config, place = config, weights.place
        self.embedding = weights.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.stack = tuple(DecoderLayer(config, weights, index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(place, config.hidden_size, config.norm_eps)
        if config.tied:
            self.head = weights.tied("lm_head", self.embedding)
        else:
            self.head = weights.linear({"lm_head": config.vocab_size}, config.hidden_size, False)
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
            attended = layer.attention.forward(normed, positions, self.cos_sin, attend)
            normed, residual = layer.mlp_norm.add(attended, residual)
            x = layer.mlp.forward(normed)
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(hidden)
        return scores

    def targets(self) -> dict[str, Tensor]:
        """Views of all weights by the names that Hugging Face checkpoints give them; fused ones are slices."""
        targets = self.embedding.targets() | {"model.norm.weight": self.norm.weight} | self.head.targets()
        for layer in self.stack:
            targets |= layer.targets()
        return targets

    def settle(self) -> str | None:
        """Once all targets are filled: the reason why what was loaded cannot be multiplied, or None."""
        projections = (module for module in self.modules() if isinstance(module, Projection))
        return next((reason for each in projections if (reason := each.settle()) is not None), None)
