"""Cache groups of models that attention backends do not read: recurrent states, and latents for most backends.

Also owns the arguments that name a backend for models with sparse attention. Who asks is `srv.args.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from srv.errors import Rejection
from srv.kept import kept_per_object
from srv.models.families.registry import is_native
from srv.models.families.trees import native_tree_of_model
from srv.platform.facts import BackendSpec
from srv.platform.layers import layer_names
from srv.specs import ModelFacts, Recurrent, spec_name

SPARSE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"prefill_attention_backend": ("nsa_prefill_backend",), "decode_attention_backend": ("nsa_decode_backend",)}
)


def unread_groups(model: ModelFacts | None, spec: BackendSpec) -> tuple[str, ...]:
    """Why an attention backend is not asked about a model: a clause for each group without a key and a value per head.

    A check of a backend that computes no latent attention may read the heads of every group.
    """
    groups = model.cache_groups if model else ()
    recurrent = tuple(
        f"the cache group of {layer_names(group.layers)} is {spec_name(group)}, which no attention backend of this "
        "version of srv reads"
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


def why_not_native(model: ModelFacts, model_impl: str | None) -> str | None:
    """Why no native layers compute a model; None if they do."""
    if model_impl == "transformers":
        return "model_impl is transformers"
    tree_or_reason = native_tree_of_model(model)
    return tree_or_reason if isinstance(tree_or_reason, str) else None


def unserved_states(model: ModelFacts | None, model_impl: str | None) -> Rejection | None:
    """The refusal of a model that keeps recurrent states, if no native layers compute it: only they read these."""
    recurrent = next((group for group in (model.cache_groups if model else ()) if isinstance(group, Recurrent)), None)
    if model is None or recurrent is None or (why := why_not_native(model, model_impl)) is None:
        return None
    return Rejection(
        "recurrent_states",
        "model",
        None,
        "memory budget",
        f"{len(recurrent.layers)} of its layers keep recurrent states"
        f" ({', '.join(state.name for state in recurrent.states)}), and "
        f"no native layers compute them here ({why}): the classes of transformers keep such states themselves",
        "Choose a model with native layers and leave --model-impl at auto, or one whose layers all use attention.",
    )


@kept_per_object
def without_states(model: ModelFacts) -> ModelFacts:
    """The facts without the recurrent cache groups that native layers compute: no attention backend reads those."""
    if not is_native(model.architecture):
        return model
    paged = tuple(group for group in model.cache_groups if not isinstance(group, Recurrent))
    return replace(model, cache_groups=paged) if paged else model
