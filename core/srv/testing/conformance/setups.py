"""Setups of a plugin's backends: what it declares, resolved for small models on this device.

An `AttentionSetup` is one backend with one KV layout that the plugin accepts. What it refuses is not tested; the
refusal is kept, so that a check can say why it does not apply.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from msgspec import structs

from srv.args.resolve import resolve
from srv.args.statement import Resolved, UserStatement
from srv.errors import Refusal
from srv.models.base import torch_dtype
from srv.models.facts.attention_layers import attention_layers
from srv.planning.pools import kv_dtype
from srv.platform.facts import BackendSpec
from srv.platform.interface import AttentionBackend, BackendContext, KVBuffers
from srv.platform.layers import layer_kinds, missing_traits, unsupported_layers
from srv.platform.pools import allocate_pool as allocate
from srv.platform.registry import find_all_backends, find_backends
from srv.specs import KVLayout, ModelFacts
from srv.testing.conformance.facts import DTYPES as DTYPES
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.values import user_input, user_statement
from srv.worker.attention import SplitAttention

PAGE_SIZES = (4, 16, 32, 64, 128)  # tried in turn, besides the plugin's own
ALL_PAGE_SIZES = len(PAGE_SIZES) + 1
HEAD_DIMS = (64, 128, 32, 80)  # in the order in which checks prefer them
FURTHER_HEAD_DIMS = (96, 192, 256)
CONTEXT_LENGTH = 2048  # of the models, so that the longest rows fit
# Head sizes per backend in the checks of paging, mixed batches, int8 KV and captured steps: a kernel may choose its
# code path by head size.
MAX_HEAD_SIZES = 2
MIN_SPAN = 4  # tokens
BOTH = "prefill and decode"
# What a backend may compute, with the argument that names it for that: all steps, or one kind of rows beside another
# backend, which is then the partner.
ROLES: Mapping[str, str] = MappingProxyType(
    {
        BOTH: "attention_backend",
        "prefill": "prefill_attention_backend",
        "decode": "decode_attention_backend",
    }
)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest cases of attention: `tokens` of a row, and `rows` of a step. page_sizes: how many are tried, where
    rows end around pages; captured_page_sizes: the same in captured steps."""

    tokens: int
    rows: int
    page_sizes: int
    captured_page_sizes: int


NATIVE, INTERPRETED = Largest(1200, 72, ALL_PAGE_SIZES, ALL_PAGE_SIZES), Largest(300, 34, 2, 1)


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
class AttentionSetup:
    """An attention backend that fits, with a KV layout; `dtype` is that of the queries and of the result.

    role: one of `ROLES`. partner: the backend of the rows that this one does not compute; itself if it computes all.
    """

    spec: BackendSpec
    shape: Shape
    dtype: str
    layout: KVLayout
    role: str
    partner: BackendSpec

    @property
    def span(self) -> int:
        """The page size, or for pages of fewer than four tokens a multiple of it: lengths around it differ, and are
        more than 0."""
        return self.layout.page_size * -(-MIN_SPAN // self.layout.page_size)

    @property
    def name(self) -> str:
        """The backend's name, and its role unless it computes all rows."""
        return self.spec.name if self.role == BOTH else f"{self.spec.name} ({self.role})"

    @property
    def decodes(self) -> bool:
        """Whether the backend computes decode steps, which may be captured."""
        return self.role != "prefill"

    @property
    def takes_lengths(self) -> bool:
        """Whether all steps may be planned with `AttentionBatch.lengths`."""
        return self.spec.lengths == self.partner.lengths == "device"

    def computing(self, queries: int) -> AttentionSetup:
        """The setup of the backend that computes rows of so many query tokens: this one, or that of the partner."""
        if self.role == BOTH or (self.role == "decode") == (queries == 1):
            return self
        role = "prefill" if self.role == "decode" else "decode"
        return replace(self, spec=self.partner, partner=self.spec, role=role)

    def with_layers(self, count: int) -> AttentionSetup:
        """The same for a model of `count` layers."""
        group = structs.replace(self.layout.group, layers=tuple(range(count)))
        return replace(self, layout=replace(self.layout, group=group))

    def __str__(self) -> str:
        kv = "" if self.layout.dtype == self.dtype else f" over {self.layout.dtype}"
        return f"{self.name}, {self.dtype}{kv}, {self.shape}, pages of {self.layout.page_size}"


def is_native(kit: Kit) -> bool:
    """Whether the device computes at the speed of its processor, so that large cases take seconds.

    Where `DeviceFacts.simulated` is set, kernels that were written for hardware run in an interpreter, which takes
    about a millisecond for what a processor does at once. A platform whose device is made of the host's operators
    (`Manifest.simulated` alone) computes natively.
    """
    return not kit.device_facts.simulated


def largest(kit: Kit) -> Largest:
    return NATIVE if is_native(kit) else INTERPRETED


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


@dataclass(frozen=True, slots=True)
class Conditions:
    """What setups are resolved with. captured: graphs are enabled, if the plugin declares them. kv_dtype: that of the
    pool, if given."""

    captured: bool = False
    kv_dtype: str = ""

    def statements(self, kit: Kit) -> list[UserStatement]:
        enabled = [user_statement("disable_graphs", False)] if self.captured and "graphs" in kit.capabilities else []
        return enabled + ([user_statement("kv_cache_dtype", self.kv_dtype)] if self.kv_dtype else [])


def find_setups(
    kit: Kit, spec: BackendSpec, shape: Shape, dtype: str, max_page_sizes: int, conditions: Conditions = Conditions()
) -> tuple[list[AttentionSetup], list[str]]:
    """The setups of an attention backend for a shape and dtype, smallest pages first, and why there are none.

    A backend that does not fit all steps is tried for prefill and decode alone. max_page_sizes: per role.
    """
    statements = conditions.statements(kit)
    fitting, reason = setups_in_role(kit, spec, BOTH, shape, dtype, max_page_sizes, statements)
    if not fitting:
        for role in roles(kit, spec)[BOTH in roles(kit, spec) :]:
            fitting += setups_in_role(kit, spec, role, shape, dtype, max_page_sizes, statements)[0]
    return fitting, [] if fitting else [f"{spec.name}: {reason}"]


def setups_in_role(
    kit: Kit,
    spec: BackendSpec,
    role: str,
    shape: Shape,
    dtype: str,
    max_page_sizes: int,
    statements: Sequence[UserStatement],
) -> tuple[list[AttentionSetup], str]:
    """The setups of one backend in one role, and why there is none: the refusal of the plugin's own page size."""
    fitting: dict[int, AttentionSetup] = {}
    reason = _unsupported(spec, shape, dtype)
    for page_size in () if reason else (*PAGE_SIZES, None):
        if len(fitting) == max_page_sizes:
            break
        try:
            setup = _setup(kit, spec, role, shape, dtype, page_size, statements)
        except Refusal as refusal:
            reason = "; ".join(dict.fromkeys(rejection.reason for rejection in refusal.rejections))
            continue
        fitting[setup.layout.page_size] = setup
    return list(fitting.values()), reason


def _unsupported(spec: BackendSpec, shape: Shape, dtype: str) -> str:
    """Which layers of a shape's model the spec has no trait for, with any arguments; empty if there are none."""
    model = _model(shape, dtype)
    kinds = layer_kinds(attention_layers(model), model)
    return "; ".join(unsupported_layers(kinds, partial(missing_traits, spec.layer_traits)))


def _model(shape: Shape, dtype: str) -> ModelFacts:
    return small_model(dtype, shape.heads, shape.kv_heads, shape.head_dim, CONTEXT_LENGTH, dict(shape.fields))


def _setup(
    kit: Kit,
    spec: BackendSpec,
    role: str,
    shape: Shape,
    dtype: str,
    page_size: int | None,
    more: Sequence[UserStatement],
) -> AttentionSetup:
    """Resolved once per process. Raises Refusal if the plugin refuses it."""
    key = (spec.name, role, repr(shape), dtype, page_size, repr(more))
    if key not in kit.setups:
        try:
            kit.setups[key] = _resolved(kit, spec, role, shape, dtype, page_size, more)
        except Refusal as refusal:
            kit.setups[key] = refusal
    setup = kit.setups[key]
    if isinstance(setup, Refusal):
        raise setup
    return setup


def _resolved(
    kit: Kit,
    spec: BackendSpec,
    role: str,
    shape: Shape,
    dtype: str,
    page_size: int | None,
    more: Sequence[UserStatement],
) -> AttentionSetup:
    model = _model(shape, dtype)
    statements = [user_statement(ROLES[role], spec.name), user_statement("dtype", dtype), *more]
    if page_size is not None:
        statements.append(user_statement("page_size", page_size))
    resolved = resolve_for(kit, model, *statements)
    config = resolved.config
    (group,) = model.cache_groups
    layout = KVLayout(group, config.memory.page_size, kv_dtype(config), spec.kv_order)
    other = ROLES["prefill" if role == "decode" else "decode"]
    return AttentionSetup(spec, shape, dtype, layout, role, resolved.backends[other].spec)


def roles(kit: Kit, spec: BackendSpec) -> tuple[str, ...]:
    """The roles in which an attention backend fits a small model; resolved once per process and backend."""
    if spec.name not in kit.roles:
        kit.roles[spec.name] = tuple(role for role in ROLES if _fits(kit, spec, role))
    return kit.roles[spec.name]


def _fits(kit: Kit, spec: BackendSpec, role: str) -> bool:
    shapes = [*(Shape(4, 4, head_dim) for head_dim in HEAD_DIMS), Shape(4, 2, HEAD_DIMS[0])]
    smallest = [(shape, dtype, None) for dtype in declared_dtypes(kit) for shape in shapes]
    for shape, dtype, page_size in (*smallest, *((*smallest[0][:2], size) for size in PAGE_SIZES)):
        try:
            _setup(kit, spec, role, shape, dtype, page_size, ())
        except Refusal:
            continue
        return True
    return False


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
) -> tuple[AttentionSetup, ...]:
    """Setups of each attention backend in the first dtype and the first `max_head_sizes` head sizes that it supports.

    dtypes: the candidates; the declared ones if empty. max_page_sizes: with the first head size; with others, at most
    two. fields: of the model's configuration. captured, kv_dtype: see `Conditions`. Raises NotApplicable if no backend
    supports any.
    """
    chosen: list[AttentionSetup] = []
    refusals: list[str] = []
    for spec in backend_specs(kit, "attention"):
        by_role: dict[str, list[AttentionSetup]] = {}
        for dtype in dtypes or declared_dtypes(kit):
            for head_dim in HEAD_DIMS:
                shape = Shape(heads, kv_heads, head_dim, tuple(fields.items()))
                pages = min(max_page_sizes, 2) if by_role else max_page_sizes
                setups, refused = find_setups(kit, spec, shape, dtype, pages, Conditions(captured, kv_dtype))
                refusals += refused
                for setup in setups:
                    of_role = by_role.setdefault(setup.role, [])
                    if (
                        all(earlier.dtype == dtype for earlier in of_role)
                        and _head_sizes([*of_role, setup]) <= max_head_sizes
                    ):
                        of_role.append(setup)
                if _served(kit, spec, by_role, max_head_sizes):
                    break
            if _served(kit, spec, by_role, 1):
                break
        chosen += [setup for of_role in by_role.values() for setup in of_role]
    if not chosen:
        raise NotApplicable(f"no attention backend supports such a model here: {'; '.join(dict.fromkeys(refusals))}")
    return tuple(chosen)


def _head_sizes(setups: Sequence[AttentionSetup]) -> int:
    return len({setup.shape.head_dim for setup in setups})


def _served(kit: Kit, spec: BackendSpec, by_role: Mapping[str, Sequence[AttentionSetup]], head_sizes: int) -> bool:
    """Whether a backend has setups of so many head sizes, in every role in which it fits small models."""
    claimed = roles(kit, spec)
    needed = (BOTH,) if BOTH in claimed else claimed
    return bool(needed) and all(_head_sizes(by_role.get(role, ())) >= head_sizes for role in needed)


def allocate_pool(kit: Kit, layout: KVLayout, pages: int) -> KVBuffers:
    """Allocate a pool as a worker does. Fault if the platform returns something else."""
    buffers: object = allocate(kit.platform, layout, pages)
    if not isinstance(buffers, KVBuffers):
        raise Fault(f"kv_buffers returned a {type(buffers).__name__}, not a KVBuffers")
    return buffers


def build_backend(kit: Kit, spec: BackendSpec, kv: KVBuffers | None, max_rows: int = 128) -> Any:
    """Import a backend and build it from its context, as a worker does."""
    values = resolve_for(kit, small_model()).config if spec.arguments else None
    arguments = {name: values.get(name) for name in spec.arguments} if values is not None else {}
    context = BackendContext(kit.platform, kit.device, kv, max_rows, kit.transfers, arguments)
    return pkgutil.resolve_name(spec.target)(context)


def build_attention(kit: Kit, setup: AttentionSetup, kv: KVBuffers) -> tuple[AttentionBackend, AttentionBackend]:
    """What computes all steps of a setup, as a worker builds it, and the setup's own backend."""
    backend: AttentionBackend = build_backend(kit, setup.spec, kv)
    if setup.role == BOTH:
        return backend, backend
    partner: AttentionBackend = build_backend(kit, setup.partner, kv)
    extend, decode = (backend, partner) if setup.role == "prefill" else (partner, backend)
    return SplitAttention(extend, decode, kit.transfers), backend


def sampling_backends(kit: Kit) -> Iterator[tuple[str, Any]]:
    """Build every sampling backend that fits a small model in a declared dtype. NotApplicable if none does."""
    refused: list[str] = []
    fits = False
    for spec in backend_specs(kit, "sampling"):
        reason = why_not_sampling(kit, spec)
        if reason:
            refused.append(f"{spec.name}: {reason}")
            continue
        fits = True
        yield spec.name, build_backend(kit, spec, None, max_rows=256)
    if not fits:
        raise NotApplicable(f"no sampling backend fits here: {'; '.join(refused)}")


def why_not_sampling(kit: Kit, spec: BackendSpec) -> str:
    """Why a sampling backend fits a small model in no declared dtype; empty if it fits in one."""
    reasons: list[str] = []
    for dtype in declared_dtypes(kit) or ("float32",):
        try:
            resolve_for(
                kit, small_model(dtype), user_statement("sampling_backend", spec.name), user_statement("dtype", dtype)
            )
        except Refusal as refusal:
            reasons += [rejection.reason for rejection in refusal.rejections]
            continue
        return ""
    return "; ".join(dict.fromkeys(reasons))


def dtype_of(name: str) -> torch.dtype:
    return torch_dtype(name)
