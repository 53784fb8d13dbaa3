"""The layers of LFM3: those of LFM2, with a gate per head of attention, and norms of the outputs of a layer's parts."""

from __future__ import annotations

from torch import Tensor

from srv.models.architectures.attention import Attention
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.hybrid_layers import HybridStack
from srv.models.architectures.lfm2 import OUTPUT_NORMS, Lfm2Config
from srv.models.architectures.lfm2_layers import Lfm2Layer
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.layers.norm import RMSNorm


class HeadGatedAttention(Attention):
    """Attention, the result of each of whose heads is multiplied by the sigmoid of a gate that the input has for it."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, prefix: str, index: int) -> None:
        super().__init__(config, factory, prefix, index)
        self.gate_proj = factory.linear({f"{prefix}.gate_proj": config.heads}, config.hidden_size, False)

    def gated(self, x: Tensor, attended: Tensor) -> Tensor:
        return attended * self.gate_proj.kernel(x).sigmoid().unsqueeze(-1)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return *super().projections, self.gate_proj


class Lfm3Layer(Lfm2Layer):
    """One layer."""

    def __init__(self, config: Lfm2Config, factory: LayerFactory, index: int) -> None:
        attention = HeadGatedAttention if config.head_gates else Attention
        super().__init__(config, factory, index, attention)
        sizes, context = config.decoder, factory.context
        self.has_local_rope = config.attends[index] and sizes.windows[index] is not None
        if config.output_norms:
            self.norm_names = (*self.norm_names, *OUTPUT_NORMS)
            widths = (sizes.hidden_size, sizes.norm_eps)
            self.norm_outputs(*(RMSNorm(context, *widths, with_residual=False) for _ in range(2)))


class Lfm3(HybridStack[Lfm3Layer]):
    """A whole model."""

    def __init__(self, config: Lfm2Config, factory: LayerFactory, context_length: int) -> None:
        super().__init__(
            config.decoder,
            factory,
            context_length,
            lambda index: Lfm3Layer(config, factory, index),
            local_rope=config.local_rope,
        )
