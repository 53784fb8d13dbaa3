"""Which cache groups of a model attention backends are asked about (`srv.args.backends`), and the arguments of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from srv.kept import kept_per_object
from srv.models.architectures.registry import find as find_architecture
from srv.models.architectures.registry import native_or_reason
from srv.platform.facts import BackendSpec
from srv.platform.layers import layer_names
from srv.specs import ModelFacts, Recurrent, spec_name

SPARSE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"prefill_attention_backend": ("nsa_prefill_backend",), "decode_attention_backend": ("nsa_decode_backend",)}
)


def unread_groups(model: ModelFacts | None, spec: BackendSpec) -> tuple[str, ...]:
    """Why an attention backend is not asked about a model: its groups without a key and a value per head.

    A check of a backend that computes no latent attention may read the heads of every group.
    """
    groups = model.cache_groups if model else ()
    recurrent = tuple(
        f"the cache group of {layer_names(group.layers)} is {spec_name(group)}, which no attention backend of this "
        f"version of srv reads{_why_not_native(model)}"
        for group in groups
        if isinstance(group, Recurrent)
    )
    latent = tuple(
        f"it cannot compute {layer_names(group.layers)}: it does not support multi-head latent attention (MLA)"
        for group in (model.latents if model and not spec.latent else ())
    )
    return recurrent + latent


def has_indexer(model: ModelFacts) -> bool:
    """Whether layers read the keys that an indexer chooses (sparse attention)."""
    return any(group.indexed for group in model.latents)


def sparse_arguments(slot: str, model: ModelFacts | None) -> tuple[str, ...]:
    """The arguments that name a slot's backend for models with sparse attention, before those for all models."""
    return SPARSE.get(slot, ()) if model is None or has_indexer(model) else ()


def _why_not_native(model: ModelFacts | None) -> str:
    """What keeps the native layers of an architecture from computing the model; "" if there are none."""
    if model is None or find_architecture(model.architecture) is None:
        return ""
    native = native_or_reason(model.architecture, model.config)
    return f" (native layers, which would, do not compute it: {native})" if isinstance(native, str) else ""


@kept_per_object
def without_states(model: ModelFacts) -> ModelFacts:
    """The facts without the recurrent cache groups that native layers compute: no attention backend reads those."""
    if find_architecture(model.architecture) is None:
        return model
    paged = tuple(group for group in model.cache_groups if not isinstance(group, Recurrent))
    return replace(model, cache_groups=paged) if paged else model
