"""Setups of a plugin's backends: what it declares, resolved for small models on this device.

A `Setup` is one backend with one KV layout that the plugin accepts. What it refuses is not tested; the refusal is
kept, so that a check can say why it does not apply.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from srv.args.resolve import resolve
from srv.args.statement import Resolved, UserStatement
from srv.errors import Refusal
from srv.models.base import torch_dtype
from srv.planning.pools import kv_dtype
from srv.platform.facts import BackendSpec
from srv.platform.interface import BackendContext, KVBuffers
from srv.platform.pools import allocate_pool as allocate
from srv.platform.registry import find_all_backends, find_backends
from srv.specs import KVLayout, ModelFacts
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.values import user_input, user_statement

DTYPES = ("float32", "bfloat16", "float16")  # in the order in which checks prefer them
PAGE_SIZES = (4, 16, 32, 64, 128)  # tried in turn, besides the plugin's own
HEAD_DIMS = (64, 128, 32, 80)
# Head sizes per backend in the checks of paging, mixed batches, int8 KV and captured steps: a kernel may choose its
# code path by head size.
MAX_HEAD_SIZES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of an attention layer, and further fields of the model's configuration."""

    heads: int
    kv_heads: int
    head_dim: int
    fields: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Setup:
    """An attention backend that fits, with a KV layout; `dtype` is that of the queries and of the result."""

    spec: BackendSpec
    shape: Shape
    dtype: str
    layout: KVLayout

    def __str__(self) -> str:
        kv = "" if self.layout.dtype == self.dtype else f" over {self.layout.dtype}"
        return f"{self.spec.name}, {self.dtype}{kv}, {self.shape}, pages of {self.layout.page_size}"


def declared_dtypes(kit: Kit) -> tuple[str, ...]:
    """The dtypes among the capabilities."""
    return tuple(dtype for dtype in DTYPES if dtype in kit.capabilities)


def backend_specs(kit: Kit, family: str) -> tuple[BackendSpec, ...]:
    """The backends of a family: the plugin's own, and those that other distributions add."""
    return (*kit.manifest.facts.backends.get(family, ()), *find_backends(kit.name, family))


def resolve_for(kit: Kit, model: ModelFacts, *statements: UserStatement) -> Resolved:
    """The resolved configuration for this device. Raises Refusal if it is refused."""
    extra = find_all_backends(kit.name)
    return resolve(user_input(*statements), manifest=kit.manifest, device=kit.device_facts, model=model, backends=extra)


def find_setups(
    kit: Kit, shape: Shape, dtype: str, max_page_sizes: int = 2, *, captured: bool = False, kv_dtype: str = ""
) -> tuple[list[Setup], list[str]]:
    """The setups of all attention backends for a shape and dtype, smallest pages first, and the refusals.

    max_page_sizes: per backend. captured: with graphs enabled, if the plugin declares them. kv_dtype: that of the pool,
    if given.
    """
    statements = [user_statement("disable_graphs", False)] if captured and "graphs" in kit.capabilities else []
    statements += [user_statement("kv_cache_dtype", kv_dtype)] if kv_dtype else []
    found: list[Setup] = []
    refused: list[str] = []
    for spec in backend_specs(kit, "attention"):
        fitting: dict[int, Setup] = {}
        for page_size in (*PAGE_SIZES, None):
            if len(fitting) == max_page_sizes:
                break
            try:
                setup = _setup(kit, spec, shape, dtype, page_size, statements)
            except Refusal as refusal:
                if page_size is None and not fitting:
                    refused.append(f"{spec.name}: {'; '.join(each.reason for each in refusal.rejections)}")
                continue
            fitting[setup.layout.page_size] = setup
        found.extend(fitting.values())
    return found, refused


def _setup(
    kit: Kit, spec: BackendSpec, shape: Shape, dtype: str, page_size: int | None, more: Sequence[UserStatement]
) -> Setup:
    model = small_model(dtype, shape.heads, shape.kv_heads, shape.head_dim, fields=dict(shape.fields))
    statements = [user_statement("attention_backend", spec.name), user_statement("dtype", dtype), *more]
    if page_size is not None:
        statements.append(user_statement("page_size", page_size))
    config = resolve_for(kit, model, *statements).config
    (group,) = model.cache_groups
    return Setup(spec, shape, dtype, KVLayout(group, config.memory.page_size, kv_dtype(config), spec.kv_order))


def select_setups(
    kit: Kit,
    heads: int = 4,
    kv_heads: int = 4,
    *,
    dtypes: Sequence[str] = (),
    max_page_sizes: int = 2,
    max_head_sizes: int = 1,
    fields: Mapping[str, Any] = MappingProxyType({}),
    captured: bool = False,
    kv_dtype: str = "",
) -> tuple[Setup, ...]:
    """Setups of each attention backend in the first dtype and the first `max_head_sizes` head sizes that it supports.

    dtypes: the candidates; the declared ones if empty. max_page_sizes: per head size. fields: of the model's
    configuration. captured, kv_dtype: as in `find_setups`. Raises NotApplicable if no backend supports any.
    """
    chosen: dict[str, list[Setup]] = {}
    refusals: list[str] = []
    for dtype in dtypes or declared_dtypes(kit):
        for head_dim in HEAD_DIMS:
            shape = Shape(heads, kv_heads, head_dim, tuple(fields.items()))
            found, refused = find_setups(kit, shape, dtype, max_page_sizes, captured=captured, kv_dtype=kv_dtype)
            refusals += refused
            for setup in found:
                kept_setups = chosen.setdefault(setup.spec.name, [])
                sizes = {each.shape.head_dim for each in (*kept_setups, setup)}
                if len(sizes) <= max_head_sizes and all(each.dtype == setup.dtype for each in kept_setups):
                    kept_setups.append(setup)
    flat = tuple(setup for each in chosen.values() for setup in each)
    if not flat:
        raise NotApplicable(f"no attention backend supports such a model here: {'; '.join(dict.fromkeys(refusals))}")
    return flat


def allocate_pool(kit: Kit, layout: KVLayout, pages: int) -> KVBuffers:
    """Allocate a pool as a worker does. Fault if the platform returns something else."""
    buffers: object = allocate(kit.platform, layout, pages)
    if not isinstance(buffers, KVBuffers):
        raise Fault(f"kv_buffers returned a {type(buffers).__name__}, not a KVBuffers")
    return buffers


def build_backend(kit: Kit, spec: BackendSpec, kv: KVBuffers | None, max_rows: int = 64) -> Any:
    """Import a backend and build it from its context, as a worker does."""
    context = BackendContext(kit.platform, kit.device, kv, max_rows, kit.transfers)
    return pkgutil.resolve_name(spec.target)(context)


def sampling_backends(kit: Kit) -> Iterator[tuple[str, Any]]:
    """Build every sampling backend that fits a small model. Raises NotApplicable if none does."""
    dtype = (*declared_dtypes(kit), "float32")[0]
    refused: list[str] = []
    fits = False
    for spec in backend_specs(kit, "sampling"):
        try:
            resolve_for(
                kit, small_model(dtype), user_statement("sampling_backend", spec.name), user_statement("dtype", dtype)
            )
        except Refusal as refusal:
            refused.append(f"{spec.name}: {'; '.join(each.reason for each in refusal.rejections)}")
            continue
        fits = True
        yield spec.name, build_backend(kit, spec, None, max_rows=256)
    if not fits:
        raise NotApplicable(f"no sampling backend fits here: {'; '.join(refused)}")


def dtype_of(name: str) -> torch.dtype:
    return torch_dtype(name)
