"""The layers of OLMo Hybrid: attention in some of them, the gated delta rule in the others.

    ─┬─ norm ─ delta rule ─(+)─┬─ norm ─ MLP ─(+)─ …      ─┬─ attention ─ norm ─(+)─┬─ MLP ─ norm ─(+)─ …
     └──────── residual ────────┘└── residual ───┘          └───── residual ─────────┘└── residual ───┘

Owns the names that checkpoints give to these weights.
"""

from __future__ import annotations

from srv.models.architectures.attention import Attention
from srv.models.architectures.hybrid_layers import HybridLayer, HybridStack
from srv.models.architectures.olmo_hybrid import DELTA_EPS, OlmoHybridConfig
from srv.models.layers.delta import GatedDeltaNet
from srv.models.layers.factory import LayerFactory
from srv.models.layers.mlp import GatedMLP
from srv.models.layers.norm import RMSNorm


class OlmoHybridLayer(HybridLayer):
    """One layer."""

    def __init__(self, config: OlmoHybridConfig, factory: LayerFactory, index: int) -> None:
        super().__init__()
        sizes, context, attends = config.decoder, factory.context, config.attends[index]
        hidden, eps = sizes.hidden_size, sizes.norm_eps
        self.prefix = f"model.layers.{index}"
        self.mixer_name = "self_attn" if attends else "linear_attn"
        name = f"{self.prefix}.{self.mixer_name}"
        of_mixer, of_mlp = (RMSNorm(context, hidden, eps, with_residual=not attends) for _ in range(2))
        if attends:
            self.norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")
            self.attention_norm, self.mlp_norm = None, None
            self.norm_outputs(of_mixer, of_mlp)
            self.mixer = Attention(sizes, factory, name, index)
        else:
            self.attention_norm, self.mlp_norm = of_mixer, of_mlp
            self.mixer = GatedDeltaNet(factory, name, hidden, config.delta, DELTA_EPS, index)
        self.feed_forward = GatedMLP(factory, f"{self.prefix}.mlp", hidden, sizes.intermediate_size, False)


class OlmoHybrid(HybridStack[OlmoHybridLayer]):
    """A whole model."""

    def __init__(self, config: OlmoHybridConfig, factory: LayerFactory, context_length: int) -> None:
        super().__init__(config.decoder, factory, context_length, lambda index: OlmoHybridLayer(config, factory, index))
