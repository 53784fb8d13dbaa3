"""The layouts of one rank's pools: pages of each cache group, with the scales of their layers, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from srv.args.config import Config
from srv.executor.spec import EngineSpec
from srv.planning.kv_scales import ScaleSource, configured_scales
from srv.planning.pools import cache_specs, kv_dtype
from srv.planning.states import state_specs
from srv.specs import CacheSpec, KVLayout


@dataclass(frozen=True, slots=True)
class PoolLayouts:
    """`groups`: the cache groups with pages; `states`: those of recurrent states. `order`: `EngineSpec.kv_order`."""

    config: Config
    groups: tuple[CacheSpec, ...]
    states: tuple[CacheSpec, ...]
    order: str
    scales: ScaleSource

    @classmethod
    def of(cls, spec: EngineSpec, rank: int) -> Self:
        """Those of a resolved configuration. `rank`: among those that divide heads.

        Raises ModelError (kv_scales) for unusable scales.
        """
        config, model = spec.config, spec.model
        groups, states = cache_specs(config, model), state_specs(config, model)
        return cls(config, groups, states, spec.kv_order, configured_scales(config, model, rank))

    def paged(self, page_sizes: Sequence[int]) -> list[KVLayout]:
        """The layout of each cache group, whose pages have these sizes."""
        dtype = kv_dtype(self.config)
        return [
            KVLayout(group, size, dtype, self.order, self.scales.of(group.layers))
            for group, size in zip(self.groups, page_sizes, strict=True)
        ]

    def recurrent(self) -> list[KVLayout]:
        """The layout of each group of states, one request to a page."""
        return [KVLayout(group, 1, kv_dtype(self.config)) for group in self.states]
