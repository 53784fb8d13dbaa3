"""L1: which backends the other checks exercise, and which layers attention computes, as declared and as answered.

Whether they compute correctly is for the checks of `srv.testing.conformance.attention` and `sampler`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from srv.errors import PluginError
from srv.platform.contract import check_attention, why_unsupported
from srv.platform.facts import BackendSpec
from srv.platform.interface import AttentionBackend
from srv.platform.layers import missing_traits
from srv.specs import AttentionLayer
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.setups import (
    BOTH,
    HEAD_DIMS,
    AttentionSetup,
    Shape,
    allocate_pool,
    backend_specs,
    build_backend,
    declared_dtypes,
    find_setups,
    roles,
    setups_in_role,
    why_not_sampling,
)

HEADS = ((4, 4), (4, 2), (8, 2), (4, 1))  # (query heads, KV heads)
WINDOWS = (None, 1, 5)
SOFT_CAPS = (None, 3.0, 50.0)
SLOPE = 0.25  # of ALiBi
CHUNK = 8
_PAGES = 1  # as in a worker that asks before weights are read


def exercised(kit: Kit) -> str:
    """Every backend of a family that srv uses fits one of the kit's small models, in at least one role.

    NotApplicable, naming each one that no check exercises, and why.
    """
    run: list[str] = []
    missed: list[str] = []
    for spec in backend_specs(kit, "attention"):
        served_roles = roles(kit, spec)
        if served_roles:
            run.append(
                f"attention backend {spec.name} ({BOTH if BOTH in served_roles else ' and '.join(served_roles)})"
            )
        else:
            missed.append(f"attention backend {spec.name}: {_why_unfit(kit, spec)}")
    for spec in backend_specs(kit, "sampling"):
        reason = why_not_sampling(kit, spec)
        run += [] if reason else [f"sampling backend {spec.name}"]
        missed += [f"sampling backend {spec.name}: {reason}"] if reason else []
    if missed:
        raise NotApplicable(f"not exercised: {'; '.join(missed)}. Exercised: {', '.join(run) or 'none'}")
    return ", ".join(run)


def _why_unfit(kit: Kit, spec: BackendSpec) -> str:
    reasons = [
        setups_in_role(kit, spec, BOTH, Shape(4, 4, HEAD_DIMS[0]), dtype, 1, ())[1] for dtype in declared_dtypes(kit)
    ]
    return "; ".join(dict.fromkeys(reasons))


def layers(kit: Kit) -> str:
    """The traits of each attention backend's spec are those of the layers that the live backend supports."""
    counts: dict[str, int] = {}
    for (heads, kv_heads), head_dim in itertools.product(HEADS, HEAD_DIMS):
        for dtype in declared_dtypes(kit)[:1]:
            for spec in backend_specs(kit, "attention"):
                setups, _ = find_setups(kit, spec, Shape(heads, kv_heads, head_dim), dtype, max_page_sizes=1)
                for setup in setups:
                    counts[setup.name] = counts.get(setup.name, 0) + _check(kit, setup)
    if not counts:
        raise NotApplicable("no attention backend supports any of the small models")
    return "; ".join(f"{name}: {count} kinds of layers" for name, count in counts.items())


def _check(kit: Kit, setup: AttentionSetup) -> int:
    """Ask one backend about layers of all windows and soft caps, with one further trait or none; their number."""
    shape, count = setup.shape, 0
    live: object = build_backend(kit, setup.spec, allocate_pool(kit, setup.layout, _PAGES))
    try:
        backend = check_attention(live, setup.spec.name)
        plain = AttentionLayer(0, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
        further: tuple[dict[str, Any], ...] = ({}, {"alibi": (SLOPE,) * shape.heads}, {"sinks": True}, {"chunk": CHUNK})
        for window, soft_cap, trait in itertools.product(WINDOWS, SOFT_CAPS, further):
            layer = dataclasses.replace(plain, window=window, soft_cap=soft_cap, **trait)
            _compare(backend, setup, layer)
            count += 1
    except PluginError as error:
        raise Fault(f"{setup}: {error.member}: {error.reason}", f"{error.remedy}.") from error
    return count


def _compare(backend: AttentionBackend, setup: AttentionSetup, layer: AttentionLayer) -> None:
    refused = why_unsupported(backend, layer, setup.spec.name)
    missing = missing_traits(setup.spec.traits, layer)
    what = " and ".join(layer.traits().values()) or "no trait"
    if refused is None and missing is not None:
        raise Fault(
            f"{setup}: it supports a layer with {what}, but the traits of its spec are {setup.spec.traits}",
            "Add the trait to BackendSpec.traits if the kernels compute it; otherwise return the reason.",
        )
    if refused is not None and missing is None:
        raise Fault(
            f"{setup}: its spec accepts a layer with {what}, but the backend refuses it: {refused}",
            "Remove the trait from BackendSpec.traits, or refuse the sizes in BackendSpec.check.",
        )
