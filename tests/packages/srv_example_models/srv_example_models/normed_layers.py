"""The layers of `normed`: attention and MLP have a norm after them, and none before.

    ─┬─ attention ─ norm ─(+)─┬─ MLP ─ norm ─(+)─ …
     └────── residual ────────┘└── residual ─┘

`srv` has this order as well; it is written again here to show how a package writes its own.
"""

from __future__ import annotations

from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import Layer
from srv.models.modules.decoder import Decoder
from srv.models.modules.decoder_layer import DecoderLayer
from srv.models.modules.place import Place


class NormedLayer(DecoderLayer):
    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        residual = residual + self.mix(residual, inputs, context)
        return None, residual + self.feed(residual)


class Normed(Decoder):
    def make_layer(self, part: Layer, place: Place) -> DecoderLayer:
        return NormedLayer(part, place)
