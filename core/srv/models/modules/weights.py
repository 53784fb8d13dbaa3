"""The weights of a model, wherever they are within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor, nn

from srv.models.checkpoints.slices import Slice
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertWeights
from srv.models.layers.linear import Projection
from srv.models.layers.weight_module import WeightModule

Weighted: TypeAlias = WeightModule | Projection | ExpertWeights | TokenEmbedding


def weighted(module: nn.Module) -> Iterator[Weighted]:
    """All modules with weights. A layer with matrices answers for what is within it."""
    for child in module.children():
        if isinstance(child, Projection | ExpertWeights | TokenEmbedding):
            yield child
            continue
        if isinstance(child, WeightModule):
            yield child
        yield from weighted(child)


def weight_views(model: nn.Module) -> dict[str, Tensor]:
    """As `srv.models.base.NativeModel.weight_views`."""
    return {name: view for each in weighted(model) for name, view in each.weight_views().items()}


def weight_slices(model: nn.Module) -> dict[str, Slice]:
    """As `srv.models.base.NativeModel.weight_slices`."""
    slices = {name: part for each in weighted(model) for name, part in each.weight_slices().items()}
    for module in weighted(model):
        if isinstance(module, ExpertWeights):
            slices |= module.slices_elsewhere()
    return slices


def prepare_loaded(model: nn.Module) -> None:
    for each in weighted(model):
        if isinstance(each, WeightModule):
            each.prepare_loaded()
