"""The native decoder: one implementation, with switches, of Llama and its relatives.

Owns the order of computation and the names that checkpoints give to the weights. Must not know files, devices or the
KV pool.

    tokens ─ embedding ─┬─ norm ─ qkv ─ [qk norm] ─ [rotary] ─ attend ─ o_proj ─(+)─┬─ norm ─ MLP ─(+)─ … ─ norm
                        └────────────────────── residual ───────────────────────────┘ └──── residual ──┘

Sharded over ranks, each rank holds some heads, some of the intermediate size and some of the vocabulary. o_proj and the
MLP then give partial sums, which two all-reduces per layer add up; the embedding is another one, and the logits are
gathered. Norms and the residual are the same on every rank.

Some architectures multiply the embeddings and what is added to the residual, (+), by constants, and divide the logits.
The others have None in their place, so that they pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.base import ForwardContext, ModelInputs, NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm
from srv.models.layers.rope import cos_sin_table
from srv.platform.interface import AttentionLayer, OpArgs


class Attention(nn.Module):
    """Grouped-query attention, usually with rotary embeddings; queries, keys and values come from one fused matrix.

    `norm`: the class of the norms of queries and keys, in models that have them.
    """

    def __init__(
        self, config: DecoderConfig, factory: LayerFactory, prefix: str, index: int, norm: type[RMSNorm] = RMSNorm
    ) -> None:
        super().__init__()
        context, dim = factory.context, config.head_dim
        counts = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        output_sizes = {f"{prefix}.{name}": count * dim for name, count in counts.items()}
        self.qkv_proj = factory.linear(output_sizes, config.hidden_size, config.qkv_bias, split="out", unit=dim)
        self.head_counts = [outputs // dim for outputs in self.qkv_proj.output_sizes.values()]
        self.total_heads = sum(self.head_counts)
        heads, kv_heads, _ = self.head_counts
        group, place = context.cache_place(index)
        scale, window = config.attention_scale, config.windows[index]
        self.layer = AttentionLayer(place, heads, kv_heads, dim, scale, window, group=group)
        output = {f"{prefix}.o_proj": config.hidden_size}
        self.o_proj = factory.linear(output, config.heads * dim, config.output_bias, split="in")
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = norm(context, dim, config.norm_eps, with_residual=False)
            self.k_norm = norm(context, dim, config.norm_eps, with_residual=False)
        self._rotary: Callable[..., tuple[Tensor, Tensor]] | None = None
        if config.rotated[index]:
            sizes = {"head_dim": dim, "rotary_dim": config.rope.rotary_dim}
            self._rotary = context.ops.bind("rotary", OpArgs(context.dtype, sizes))

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, hidden], positions int64 [T], cos_sin float32 [P, rotary_dim] -> [T, hidden]."""
        layer = self.layer
        qkv = self.qkv_proj.kernel(x).reshape(-1, self.total_heads, layer.head_dim)
        q, k, v = qkv.split_with_sizes(self.head_counts, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm.forward(q.reshape(-1, layer.head_dim)).view(-1, layer.heads, layer.head_dim)
            k = self.k_norm.forward(k.reshape(-1, layer.head_dim)).view(-1, layer.kv_heads, layer.head_dim)
        if self._rotary is not None:
            q, k = self._rotary(q, k, cos_sin, positions)
        else:
            q, k = q.contiguous(), k.contiguous()  # as backends receive them from the rotary op
        attended = context.attend(layer, q, k, v)
        return self.o_proj.kernel(attended.reshape(-1, layer.heads * layer.head_dim))


class DecoderLayer(nn.Module):
    """Attention and MLP, each preceded by a norm. Each output is added to the residual by the norm that follows."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{index}"
        self.attention_norm = RMSNorm(factory.context, config.hidden_size, config.norm_eps)
        self.attention = Attention(config, factory, f"{self.prefix}.self_attn", index)
        self.mlp_norm = RMSNorm(factory.context, config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            factory, f"{self.prefix}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias
        )

    def weight_views(self) -> dict[str, Tensor]:
        """Views of this layer's weights, by their names in the checkpoint."""
        attention, mlp = self.attention, self.mlp
        norms = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
            "self_attn.q_norm": attention.q_norm,
            "self_attn.k_norm": attention.k_norm,
        }
        views: dict[str, Tensor] = {
            f"{self.prefix}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None
        }
        for projection in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            views |= projection.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the views hold; of those that are not whole."""
        attention, mlp = self.attention, self.mlp
        slices: dict[str, Slice] = {}
        for projection in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            slices |= projection.weight_slices()
        return slices


class Decoder(NativeModel):
    """A whole model, or one rank's part."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length)
        context = factory.context
        self.embedding = factory.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self.stack = tuple(DecoderLayer(config, factory, index) for index in range(config.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = RMSNorm(context, config.hidden_size, config.norm_eps)
        if config.tied_embeddings:
            self.lm_head = factory.tied_lm_head("lm_head", self.embedding)
        else:
            self.lm_head = factory.linear({"lm_head": config.vocab_size}, config.hidden_size, False, split="out")
        self._embedding_multiplier = _unless_one(config.embedding_multiplier)
        self._residual_multiplier = _unless_one(config.residual_multiplier)
        self._logits_divisor = _unless_one(config.logits_divisor)
        self._communicator = context.communicator
        self.lookup: nn.Module = self.embedding
        if context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, context.communicator)
        self.cos_sin: Tensor
        cos_sin = cos_sin_table(config.rope, context_length).to(context.device)
        self.register_buffer("cos_sin", cos_sin, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens)
        if self._embedding_multiplier is not None:
            residual = residual * self._embedding_multiplier
        reduce = None if self._communicator is None else self._communicator.all_reduce
        multiplier = self._residual_multiplier
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            attended = layer.attention.forward(normed, inputs.positions, self.cos_sin, context)
            if reduce is not None:
                attended = reduce(attended)
            if multiplier is not None:
                attended = attended * multiplier
            normed, residual = layer.mlp_norm.add_and_norm(attended, residual)
            x = layer.mlp.forward(normed)
            if reduce is not None:
                x = reduce(x)
            if multiplier is not None:
                x = x * multiplier
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self._logits_divisor is not None:
            logits = logits / self._logits_divisor
        if self._communicator is None:
            return logits
        gathered = self._communicator.all_gather(logits)  # [ranks, N, vocab of one rank]
        return gathered.transpose(0, 1).reshape(len(logits), -1)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.embedding.weight_views() | {"model.norm.weight": self.norm.weight} | self.lm_head.weight_views()
        for layer in self.stack:
            views |= layer.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        slices = self.embedding.weight_slices() | self.lm_head.weight_slices()
        for layer in self.stack:
            slices |= layer.weight_slices()
        return slices


def _unless_one(factor: float) -> float | None:
    return None if factor == 1.0 else factor
