"""The ways in which a plugin's backends can be set up here: what it declares, resolved for small models.

A `Setup` is one backend over one KV layout that its plugin accepted. What is not accepted is not tested; it is kept
as a refusal, so that a check can say why it had nothing to look at.
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
from srv.planning.budget import kv_dtype
from srv.platform.facts import BackendSpec
from srv.platform.interface import BackendContext, KVBuffers
from srv.platform.registry import find_all_backends, find_backends
from srv.specs import KVLayout, ModelFacts
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.values import says, user_input

DTYPES = ("float32", "bfloat16", "float16")  # the order in which a check that needs one takes it
PAGE_SIZES = (4, 16, 32, 64, 128)  # tried in turn beside the plugin's own
HEAD_DIMS = (64, 128, 32, 80)
HEAD_SIZES = 2  # of each backend, where rows are laid out in many ways: kernels take other paths by the head size


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of an attention layer, and fields of the model's configuration that say what else it does."""

    heads: int
    kv_heads: int
    head_dim: int
    fields: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Setup:
    """An attention backend that fits, over a KV layout; `dtype` is of queries and of what is attended."""

    spec: BackendSpec
    shape: Shape
    dtype: str
    layout: KVLayout

    def __str__(self) -> str:
        kept = "" if self.layout.dtype == self.dtype else f" over {self.layout.dtype}"
        return f"{self.spec.name}, {self.dtype}{kept}, {self.shape}, pages of {self.layout.page_size}"


def declared_dtypes(kit: Kit) -> tuple[str, ...]:
    """The dtypes that are among the capabilities."""
    return tuple(dtype for dtype in DTYPES if dtype in kit.capabilities)


def specs(kit: Kit, family: str) -> tuple[BackendSpec, ...]:
    """The plugin's backends of a family, and those that others add to it."""
    return (*kit.manifest.facts.backends.get(family, ()), *find_backends(kit.name, family))


def resolved(kit: Kit, model: ModelFacts, *said: UserStatement) -> Resolved:
    """Everything resolved for this device; Refusal if it cannot be."""
    extra = find_all_backends(kit.name)
    return resolve(user_input(*said), manifest=kit.manifest, device=kit.device_facts, model=model, backends=extra)


def setups(
    kit: Kit, shape: Shape, dtype: str, most: int = 2, *, captured: bool = False, kv_dtype: str = ""
) -> tuple[list[Setup], list[str]]:
    """For each attention backend: its setups for a shape and dtype (smallest pages first, `most`), and refusals.

    `captured`: in steps that are captured, if the plugin declares them. `kv_dtype`: of the pool, if not left open.
    """
    said = [says("disable_graphs", False)] if captured and "graphs" in kit.capabilities else []
    said += [says("kv_cache_dtype", kv_dtype)] if kv_dtype else []
    found: list[Setup] = []
    refused: list[str] = []
    for spec in specs(kit, "attention"):
        fitting: dict[int, Setup] = {}
        for page_size in (*PAGE_SIZES, None):
            if len(fitting) == most:
                break
            try:
                setup = _setup(kit, spec, shape, dtype, page_size, said)
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
    said = [says("attention_backend", spec.name), says("dtype", dtype), *more]
    if page_size is not None:
        said.append(says("page_size", page_size))
    config = resolved(kit, model, *said).config
    (group,) = model.cache_groups
    return Setup(spec, shape, dtype, KVLayout(group, config.memory.page_size, kv_dtype(config), spec.kv_order))


def some_setups(
    kit: Kit,
    heads: int = 4,
    kv_heads: int = 4,
    *,
    dtypes: Sequence[str] = (),
    most: int = 2,
    head_sizes: int = 1,
    fields: Mapping[str, Any] = MappingProxyType({}),
    captured: bool = False,
    kv_dtype: str = "",
) -> tuple[Setup, ...]:
    """For each attention backend, setups in the first dtype and the first `head_sizes` head sizes that it takes.

    `dtypes`: those to choose from, the declared ones if empty. `most`: page sizes of each head size. `fields` of the
    model's configuration. `captured`, `kv_dtype`: as in `setups`. NotApplicable if no backend takes any.
    """
    chosen: dict[str, list[Setup]] = {}
    refused: list[str] = []
    for dtype in dtypes or declared_dtypes(kit):
        for head_dim in HEAD_DIMS:
            shape = Shape(heads, kv_heads, head_dim, tuple(fields.items()))
            found, against = setups(kit, shape, dtype, most, captured=captured, kv_dtype=kv_dtype)
            refused += against
            for setup in found:
                mine = chosen.setdefault(setup.spec.name, [])
                sizes = {each.shape.head_dim for each in (*mine, setup)}
                if len(sizes) <= head_sizes and all(each.dtype == setup.dtype for each in mine):
                    mine.append(setup)
    flat = tuple(setup for each in chosen.values() for setup in each)
    if not flat:
        raise NotApplicable(f"no attention backend takes such a model here: {'; '.join(dict.fromkeys(refused))}")
    return flat


def pool(kit: Kit, layout: KVLayout, pages: int) -> KVBuffers:
    """A KV pool of the platform. Fault if it is none."""
    buffers: object = kit.platform.kv_buffers(layout, pages)
    if not isinstance(buffers, KVBuffers):
        raise Fault(f"kv_buffers gave a {type(buffers).__name__}, not a KVBuffers")
    return buffers


def build(kit: Kit, spec: BackendSpec, kv: KVBuffers | None, max_rows: int = 64) -> Any:
    """A backend, imported and built from its context as a worker would."""
    context = BackendContext(kit.platform, kit.device, kv, max_rows)
    return pkgutil.resolve_name(spec.target)(context)


def sampling_backends(kit: Kit) -> Iterator[tuple[str, Any]]:
    """Every sampling backend that fits a small model here, built. NotApplicable if none does."""
    dtype = (*declared_dtypes(kit), "float32")[0]
    refused: list[str] = []
    fits = False
    for spec in specs(kit, "sampling"):
        try:
            resolved(kit, small_model(dtype), says("sampling_backend", spec.name), says("dtype", dtype))
        except Refusal as refusal:
            refused.append(f"{spec.name}: {'; '.join(each.reason for each in refusal.rejections)}")
            continue
        fits = True
        yield spec.name, build(kit, spec, None, max_rows=256)
    if not fits:
        raise NotApplicable(f"no sampling backend fits here: {'; '.join(refused)}")


def dtype_of(name: str) -> torch.dtype:
    return torch_dtype(name)
