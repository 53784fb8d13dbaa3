"""The layers of Gemma 3: attention and MLP have a norm before them and another one before they join the residual.

    ─┬─ norm ─ attention ─ norm ─(+)─┬─ norm ─ MLP ─ norm ─(+)─ …
     └─────────── residual ──────────┘└────── residual ─────┘

Owns the order of computation and the names that checkpoints give to the weights. Sharded over ranks like
`srv.models.architectures.decoder`: the partial sums of attention and MLP are added up before the norm that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from srv.models.architectures.decoder import Attention
from srv.models.architectures.gemma3 import Gemma3Config
from srv.models.base import ForwardContext, ModelInputs, NativeModel
from srv.models.formats.slices import Slice
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import UnitOffsetRMSNorm
from srv.models.layers.rope import cos_sin_table


class Gemma3Layer(nn.Module):
    """One layer. Each output is added to the residual by the first norm of what follows."""

    def __init__(self, config: Gemma3Config, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context = config.decoder, factory.context
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.has_window = sizes.windows[index] is not None
        self.attention_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.attention = Attention(sizes, factory, f"{self.prefix}.self_attn", index, norm=UnitOffsetRMSNorm)
        self.attention_output_norm = UnitOffsetRMSNorm(context, hidden, eps, with_residual=False)
        self.mlp_norm = UnitOffsetRMSNorm(context, hidden, eps)
        self.mlp = GatedMLP(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, False, "gelu_tanh")
        self.mlp_output_norm = UnitOffsetRMSNorm(context, hidden, eps, with_residual=False)

    def weight_views(self) -> dict[str, Tensor]:
        """Views of this layer's weights, by their names in the checkpoint."""
        norms = {
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.attention_output_norm,
            "pre_feedforward_layernorm": self.mlp_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
            "self_attn.q_norm": self.attention.q_norm,
            "self_attn.k_norm": self.attention.k_norm,
        }
        views: dict[str, Tensor] = {
            f"{self.prefix}.{name}.weight": norm.weight for name, norm in norms.items() if norm is not None
        }
        for projection in self._projections():
            views |= projection.weight_views()
        return views

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the views hold; of those that are not whole."""
        slices: dict[str, Slice] = {}
        for projection in self._projections():
            slices |= projection.weight_slices()
        return slices

    def _projections(self) -> tuple[Projection, ...]:
        attention, mlp = self.attention, self.mlp
        return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


class Gemma3(NativeModel):
    """A whole model, or one rank's part."""

    def __init__(self, config: Gemma3Config, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config, factory, context_length)
        sizes, context = config.decoder, factory.context
        self.embedding = factory.embedding("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        self.stack = tuple(Gemma3Layer(config, factory, index) for index in range(sizes.layers))
        self.layers = nn.ModuleList(self.stack)
        self.norm = UnitOffsetRMSNorm(context, sizes.hidden_size, sizes.norm_eps)
        if sizes.tied_embeddings:
            self.lm_head = factory.tied_lm_head("lm_head", self.embedding)
        else:
            self.lm_head = factory.linear({"lm_head": sizes.vocab_size}, sizes.hidden_size, False, split="out")
        # In bfloat16, 55.4 is 55.5: the models were trained with the rounded factor.
        self._embedding_multiplier = torch.tensor(sizes.embedding_multiplier).to(context.dtype).item()
        self._communicator = context.communicator
        self.lookup: nn.Module = self.embedding
        if context.communicator is not None:
            self.lookup = VocabularyParallelLookup(self.embedding, context.communicator)
        self.cos_sin: Tensor
        self.local_cos_sin: Tensor
        for name, rope in (("cos_sin", sizes.rope), ("local_cos_sin", config.local_rope)):
            table = cos_sin_table(rope, context_length).to(context.device)
            self.register_buffer(name, table, persistent=False)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        residual: Tensor = self.lookup(inputs.tokens) * self._embedding_multiplier
        x: Tensor | None = None
        for layer in self.stack:
            if x is None:
                normed = layer.attention_norm.forward(residual)
            else:
                normed, residual = layer.attention_norm.add_and_norm(x, residual)
            cos_sin = self.local_cos_sin if layer.has_window else self.cos_sin
            attended = self._sum(layer.attention.forward(normed, inputs.positions, cos_sin, context))
            normed, residual = layer.mlp_norm.add_and_norm(layer.attention_output_norm.forward(attended), residual)
            x = layer.mlp_output_norm.forward(self._sum(layer.mlp.forward(normed)))
        if x is None:
            return self.norm.forward(residual)
        return self.norm.add_and_norm(x, residual)[0]

    def _sum(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks hold of an output."""
        return partial if self._communicator is None else self._communicator.all_reduce(partial)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self._communicator is None:
            return logits
        gathered = self._communicator.all_gather(logits)  # [ranks, N, vocab of one rank]
        return gathered.transpose(0, 1).reshape(len(logits), -1)

    def prepare_loaded(self) -> None:
        for module in self.modules():
            if isinstance(module, UnitOffsetRMSNorm):
                module.prepare_loaded()

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
