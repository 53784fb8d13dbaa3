"""Divides the tensors of checkpoints that hold a projection of all experts at once.

    experts.gate_up_proj      [E, 2 I, H]    ──►    experts.0.gate_proj.weight, experts.0.up_proj.weight, …
    experts.gate_up_proj_bias [E, 2 I]       ──►    experts.0.gate_proj.bias, experts.0.up_proj.bias, …
    experts.down_proj         [E, H, I]      ──►    experts.0.down_proj.weight, …
    experts.down_proj_bias    [E, H]         ──►    experts.0.down_proj.bias, …

So transformers has them in memory. The checkpoints of some architectures have the last two axes exchanged, and may have
the columns of gate and up projection in turn. Must not know files or quantization: what it makes of a tensor is
converted further by another format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from srv.models.formats.storage import StorageFormat
from srv.models.formats.stored_weights import ExpertLayout

_PARTS = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}


class FusedExperts(StorageFormat):
    """`inner`: the format of the divided tensors, and of all others. `layout`: as `StoredWeights.fused_experts`."""

    def __init__(self, inner: StorageFormat, layout: ExpertLayout = "") -> None:
        self._inner, self._layout = inner, layout
        self._experts: dict[str, int] = {}  # of each fused tensor, once `shapes` has seen it

    def parts(self, name: str) -> tuple[str, ...]:
        count = self._experts.get(name)
        if count is None:
            return self._inner.parts(name)
        prefix, _, kind = name.rpartition(".")
        return tuple(f"{prefix}.{expert}.{part}" for expert in range(count) for part in _PARTS[kind])

    def is_read_whole(self, name: str) -> bool:
        return super().is_read_whole(name) or self._inner.is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._inner.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            _, _, kind = name.rpartition(".experts.")
            if kind not in _PARTS or len(shape) != (2 if kind.endswith("_bias") else 3):
                found[name] = shape
                continue
            self._experts[name] = shape[0]
            rows, *columns = shape[:0:-1] if self._layout else shape[1:]
            found |= dict.fromkeys(self.parts(name), (rows // len(_PARTS[kind]), *columns))
        return self._inner.shapes(found)

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        if name not in self._experts:
            return self._inner.convert(name, stored)
        rows = stored.transpose(1, 2) if self._layout and stored.dim() > 2 else stored
        count = len(_PARTS[name.rpartition(".")[2]])
        tensors = (part for expert in rows for part in self._divided(expert, count))
        converted: dict[str, Tensor] = {}
        for part, tensor in zip(self.parts(name), tensors, strict=True):
            converted |= self._inner.convert(part, tensor)
        return converted

    def _divided(self, rows: Tensor, count: int) -> tuple[Tensor, ...]:
        """The rows of each of `count` projections of one expert."""
        if self._layout == "pairs":
            return tuple(rows[part::count] for part in range(count))
        return rows.chunk(count)
