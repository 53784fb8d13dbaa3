"""Attention with the keys and values of a lower layer (Gemma 3n). Must not know the KV pool, as
`srv.models.modules.attention`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import Norm
from srv.models.blueprint.gemma import ReadingAttention as ReadingPart
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.platform.interface import OpArgs


class ReadingAttention(Mixer):
    """It writes the keys and values of the step's tokens anew, which changes nothing.

    A model whose layers have no places in a pool, as in tests of layers, has a cache for each attention.
    """

    def __init__(self, part: ReadingPart, place: Place) -> None:
        super().__init__()
        context, dim = place.context, part.head_dim
        (first, end), (kv_first, kv_end) = context.group.share(part.heads), context.group.share(part.kv_heads)
        group, cached = context.cache_place(part.source if context.cache_places else place.layer)
        self.layer = dataclasses.replace(part.layer(cached), group=group, heads=end - first, kv_heads=kv_end - kv_first)
        self.source = part.source
        self.q_proj, self.o_proj = place.linear(part.qkv), place.linear(part.output)
        assert part.rope is not None
        assert isinstance(part.q_norm, Norm)
        sizes = {"head_dim": dim, "rotary_dim": part.rope.rotary_dim}
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = context.ops.bind("rotary", OpArgs(context.dtype, sizes))
        self.cos_sin = place.tables.rotary(part.rope)
        self.q_norm = make_norm(part.q_norm, place)

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        heads, dim = self.layer.heads, self.layer.head_dim
        q = self.q_norm.forward(self.q_proj.kernel(x).view(-1, dim)).view(-1, heads, dim)
        q, _ = self._rotary(q, q[:, :1], self.cos_sin, inputs.positions)
        assert context.kept is not None
        attended = context.attend(self.layer, q, *context.kept[self.source])
        return self.o_proj.kernel(attended.reshape(-1, heads * dim))
