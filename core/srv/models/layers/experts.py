"""The experts of a layer: all of them in two tensors, whole or sharded over ranks by the intermediate size.

Owns weights on the model's device, and the names that checkpoints give to those of each expert, so that loaders can
fill them. Must not know files, nor how a token's experts are chosen (`srv.models.modules.feed_forward`). Quantized
experts are in `srv.quantization`.

    gate_up [E, 2 I, H]: the rows of gate_proj, then those of up_proj, of each expert; without a gate, only the latter
    down    [E, H, I]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from srv.models.checkpoints.slices import ELSEWHERE, Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.moe_config import DOWN, ExpertActivation, first_projections
from srv.models.layers.op_layer import OpLayer


class ExpertSizes(NamedTuple):
    """The sizes of the experts of one layer.

    `experts`: how many this rank has. `top_k`: those that each token uses. `hidden`: of the model. `intermediate`: of
    one expert. `share`: the part of the intermediate size on this rank; None for all of it. `offset`: the number of
    this rank's first expert among all. `elsewhere`: the numbers of those that other ranks have.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: ExpertActivation = "silu"
    share: Slice | None = None
    offset: int = 0
    elsewhere: tuple[int, ...] = ()

    @property
    def numbers(self) -> range:
        """Those of this rank's experts."""
        return range(self.offset, self.offset + self.experts)

    @property
    def local(self) -> int:
        """The intermediate size on this rank."""
        return self.intermediate if self.share is None else self.share.size

    @property
    def first(self) -> tuple[str, ...]:
        """The projections whose rows gate_up has, in their order."""
        return first_projections(self.activation)

    @property
    def first_rows(self) -> int:
        """Those of gate_up, for each expert, on this rank."""
        return len(self.first) * self.local

    @property
    def is_whole(self) -> bool:
        return self.local == self.intermediate

    @property
    def adds_biases(self) -> bool:
        """Whether this rank adds the biases of down_proj, which are added once to the sums of all ranks."""
        return self.share is None or self.share.begin == 0

    @property
    def op_sizes(self) -> dict[str, int]:
        """Those by which implementations of the ops are selected."""
        return {"hidden": self.hidden, "intermediate": self.local, "experts": self.experts, "top_k": self.top_k}


class ExpertWeights(OpLayer, ABC):
    """The experts of a layer, computed by an op on their matrices: `kernel(x, ids, weights)`.

    x [T, H], ids int64 [T, K], weights float32 [T, K] -> [T, H] of x's dtype. `ids` count from this rank's first
    expert, and those of other ranks' experts contribute nothing. A platform may replace the kernel after
    loading, but only if `implementation` is its own: that is the implementation chosen for experts.
    """

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes) -> None:
        super().__init__()
        self.dtype, self.inputs = context.dtype, sizes.hidden
        self.prefix, self.sizes = prefix, sizes
        self._compute: Callable[..., Tensor] = context.bind(self.op, **sizes.op_sizes)
        self.implementation = context.name_of(self.op, **sizes.op_sizes)
        self.kernel = self.compute

    @abstractmethod
    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The default kernel: the platform's op on the matrices as they were loaded."""

    @abstractmethod
    def operands(self) -> tuple[Mapping[str, Any], ...]:
        """One mapping: what the op reads beside x, ids and weights, by the names of its contract and in their order."""

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """The tensors that a loader fills, by their names in the checkpoint. They are views of `operands`."""

    @abstractmethod
    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the `weight_views` hold; of those that are not whole."""

    def slices_elsewhere(self) -> dict[str, Slice]:
        """Those of the tensors of experts that other ranks have."""
        first = f"{self.prefix}.{self.sizes.offset}."
        rests = [name.removeprefix(first) for name in self.weight_views() if name.startswith(first)]
        return {f"{self.prefix}.{expert}.{rest}": ELSEWHERE for expert in self.sizes.elsewhere for rest in rests}

    def validate_loaded(self) -> str | None:
        """Check the loaded values; called once, after loading. The reason why they are not supported, or None."""
        return None

    def weight_matrices(self) -> tuple[Tensor, ...]:
        operands = self.operands()[0]
        return tuple(operands[name] for name in ("gate_up", "down") if isinstance(operands.get(name), Tensor))

    def matrix_views(self, suffix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
        """The rows of each projection of each expert, by its name and the suffix."""
        views: dict[str, Tensor] = {}
        for expert, rows, columns in zip(self.sizes.numbers, gate_up, down, strict=True):
            first = rows.chunk(len(self.sizes.first))
            for name, view in zip((*self.sizes.first, DOWN), (*first, columns), strict=True):
                views[f"{self.prefix}.{expert}.{name}.{suffix}"] = view
        return views

    def row_slices(self, suffix: str, block: int = 1) -> dict[str, Slice]:
        """Those of the projections in gate_up: their rows on this rank, of a tensor with an entry for `block` rows."""
        if self.sizes.share is None or self.sizes.is_whole:
            return {}
        rows = self.sizes.share.scaled(1, block)
        return {
            f"{self.prefix}.{expert}.{name}.{suffix}": rows
            for expert in self.sizes.numbers
            for name in self.sizes.first
        }

    def column_slices(self, suffix: str, size: int = 1, elements: int = 1) -> dict[str, Slice]:
        """Those of down_proj: its columns on this rank, where `elements` columns are stored in `size` items."""
        if self.sizes.share is None or self.sizes.is_whole:
            return {}
        columns = self.sizes.share._replace(axis=1).scaled(size, elements)
        return {f"{self.prefix}.{expert}.{DOWN}.{suffix}": columns for expert in self.sizes.numbers}


class Experts(ExpertWeights):
    """Experts with unquantized weights, and with biases gate_up_bias [E, 2 I] and down_bias [E, H] or without.

    Of several ranks, only the first adds the biases of down_proj; the others load them and do not add them.
    """

    op = "experts"

    def __init__(self, context: BuildContext, prefix: str, sizes: ExpertSizes, bias: bool = False) -> None:
        super().__init__(context, prefix, sizes)
        self.gate_up = context.empty(sizes.experts, sizes.first_rows, sizes.hidden)
        self.down = context.empty(sizes.experts, sizes.hidden, sizes.local)
        self.gate_up_bias = context.empty(sizes.experts, sizes.first_rows) if bias else None
        self._loaded_down_bias = context.empty(sizes.experts, sizes.hidden) if bias else None
        self.down_bias = self._loaded_down_bias if sizes.adds_biases else None

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        activation = self.sizes.activation
        return self._compute(x, ids, weights, self.gate_up, self.down, self.gate_up_bias, self.down_bias, activation)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        return ({**{name: getattr(self, name) for name in names}, "activation": self.sizes.activation},)

    def weight_views(self) -> dict[str, Tensor]:
        views = self.matrix_views("weight", self.gate_up, self.down)
        if self.gate_up_bias is not None and self._loaded_down_bias is not None:
            views |= self.matrix_views("bias", self.gate_up_bias, self._loaded_down_bias)
        return views

    def weight_slices(self) -> dict[str, Slice]:
        slices = self.row_slices("weight") | self.column_slices("weight")
        return slices if self.gate_up_bias is None else slices | self.row_slices("bias")
