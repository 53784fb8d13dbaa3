"""The layers of checkpoints of compressed-tensors with several schemes: each is made by the factory of its scheme.

The conversion of stored tensors is divided in the same way. Must not know which layer has which scheme, nor what layers
do with it: `srv.quantization.mixed_schemes` and the layers of each scheme do.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from torch import Tensor

from srv.models.checkpoints.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization.fp8 import check_embedding
from srv.quantization.fp8_configs import Fp8Scheme
from srv.quantization.fp8_layers import Fp8LayerFactory, Fp8StorageFormat
from srv.quantization.method import StoredModel
from srv.quantization.mixed_schemes import Group, Scheme, StoredGroups, scheme_of
from srv.quantization.packed import PackedScheme
from srv.quantization.packed_layers import PackedLayerFactory, PackedStorageFormat
from srv.quantization.w8a8_int8_layers import W8A8LayerFactory, W8A8StorageFormat


class MixedLayerFactory(LayerFactory):
    """The layers of each group by the factory of its scheme; embeddings are not quantized."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        mixed = scheme_of(model.facts.path, model.facts.config)
        self._model, self._groups = model, StoredGroups(model, mixed)
        self._factories = {group.scheme: _factory(context, model, group.scheme) for group in mixed.groups}

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        group = self._groups.of(tuple(output_sizes))
        if group is None:
            return super().linear(output_sizes, inputs, bias, split, unit)
        return self._factories[group.scheme].linear(output_sizes, inputs, bias, split, unit)

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        group = self._groups.of(tuple(itertools.chain(*expert_names(prefix, sizes.experts))))
        if group is None:
            return super().experts(prefix, sizes, bias)
        return self._factories[group.scheme].experts(prefix, sizes, bias)

    def embedding(self, name: str, vocab: int, hidden: int) -> TokenEmbedding:
        check_embedding(self._model, name)
        return super().embedding(name, vocab, hidden)


def _factory(context: BuildContext, model: StoredModel, scheme: Scheme) -> LayerFactory:
    match scheme:
        case PackedScheme():
            return PackedLayerFactory(context, model, scheme)
        case Fp8Scheme():
            return Fp8LayerFactory(context, model, scheme)
    return W8A8LayerFactory(context, model, scheme)


class MixedStorageFormat(StorageFormat):
    """The tensors of a quantized layer in the format of its scheme."""

    def __init__(self, model: StoredModel) -> None:
        mixed = scheme_of(model.facts.path, model.facts.config)
        self._groups, self._plain = StoredGroups(model, mixed), StorageFormat()
        self._formats = {group.scheme: _storage(model, group.scheme) for group in mixed.groups}

    def parts(self, name: str) -> tuple[str, ...]:
        return self._format(name).parts(name)

    def is_read_whole(self, name: str) -> bool:
        return self._format(name).is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for name in names if self._format(name).unused((name,))}

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        by_format: dict[StorageFormat, dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            by_format.setdefault(self._format(name), {})[name] = shape
        found: dict[str, tuple[int, ...]] = {}
        for each, shapes in by_format.items():
            found |= each.shapes(shapes)
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        return self._format(name).convert(name, stored)

    def _format(self, name: str) -> StorageFormat:
        group: Group | None = self._groups.of_layer(name.rpartition(".")[0])
        return self._plain if group is None else self._formats[group.scheme]


def _storage(model: StoredModel, scheme: Scheme) -> StorageFormat:
    match scheme:
        case PackedScheme():
            return PackedStorageFormat(model, scheme)
        case Fp8Scheme():
            return Fp8StorageFormat(model, scheme)
    return W8A8StorageFormat(model, scheme)
