"""What `srv.models.families` says of a Hugging Face folder, and what follows for its facts. Torch-free.

A model whose architecture is not known has no sizes but those of its stored weights: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from srv.dtypes import ITEM_SIZES
from srv.models import derive
from srv.models.blueprint import Attention, Part
from srv.models.blueprint.latent import Latent
from srv.models.checkpoints.safetensors_header import Checkpoint
from srv.models.config.limits import MAX_SIZE
from srv.models.config.stored_sizes import stored_bytes, stored_types
from srv.models.families import registry, trees
from srv.models.unsupported import UnknownSizes
from srv.quantization import registry as quantization
from srv.quantization.method import UnknownStorage
from srv.specs import AttentionSpec, CacheSpec, FullAttention
from srv.specs import Latent as LatentSpec

# The fields of the quantities that a configuration may leave out.
DEFAULTED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
_USUAL = "bfloat16"
_DEFAULTS_WITHOUT_ATTENTION = {"heads": 1, "context": MAX_SIZE}


class KnownSizes(NamedTuple):
    """`tree`: what the model is made of; None if that is not known, for the reason `unknown`.

    `fields`: those of its language model, with defaults. `dtype`: of its activations.
    """

    architecture: str
    tree: Part | None
    fields: Mapping[str, Any]
    dtype: str
    unknown: str | None

    @property
    def known(self) -> bool:
        return self.tree is not None

    @property
    def keeps_other_states(self) -> bool:
        """Whether some layers keep something else than keys and values per head."""
        return any(not isinstance(each, AttentionSpec) for each in self.cache_groups(MAX_SIZE))

    @property
    def parameters(self) -> int | None:
        return None if self.tree is None else derive.parameters(self.tree)

    @property
    def active_parameters(self) -> int | None:
        return None if self.tree is None else derive.active_parameters(self.tree)

    def cache_groups(self, context: int) -> tuple[CacheSpec, ...]:
        return () if self.tree is None else derive.cache_groups(self.tree, context, self.dtype)

    def pool_groups(self, context: int) -> tuple[CacheSpec, ...]:
        """The cache groups as the class of transformers fills them, if it serves the model: plain keys and values.

        Latent attention computes these for every head, and values have the room of keys.
        """
        groups, first = self.cache_groups(context), self._attention()
        if not registry.runs_through_transformers(self.architecture):
            return groups
        return tuple(_plain(group, first) for group in groups)

    def default(self, quantity: str) -> Any:
        """The value of a quantity that the configuration leaves out.

        Models without attention have one head, and any context: nothing that they keep grows with it.
        """
        if self.tree is None:
            return None
        value = self.fields.get(DEFAULTED[quantity])
        attends = any(isinstance(part, Attention | Latent) for part in derive.distinct(self.tree))
        return value if value is not None or attends else _DEFAULTS_WITHOUT_ATTENTION.get(quantity)

    def head_sizes(self) -> dict[str, int]:
        """The KV heads, and the size of a head, where attention is known."""
        first = self._attention()
        if isinstance(first, Latent):
            return {"head_dim": first.head_dim}
        return {} if first is None else {"kv_heads": first.kv_heads, "head_dim": first.head_dim}

    def _attention(self) -> Attention | Latent | None:
        """The first attention whose tokens keep something; None without any."""
        parts = () if self.tree is None else derive.distinct(self.tree)
        attentions = (part for part in parts if isinstance(part, Attention | Latent))
        return next((part for part in attentions if part.cache(self.dtype) is not None), None)


def _plain(group: CacheSpec, attention: Attention | Latent | None) -> CacheSpec:
    if isinstance(group, LatentSpec) and isinstance(attention, Latent):
        size = max(attention.head_dim, attention.dims.value_dim)
        return FullAttention(group.layers, attention.heads, size, size)
    if isinstance(group, AttentionSpec):
        size = max(group.key_dim, group.value_dim)
        return msgspec.structs.replace(group, key_dim=size, value_dim=size)
    return group


def _usual_dtype(tree: Part) -> str:
    """That of most published checkpoints whose configuration states none: encoders have 32 bits, others 16."""
    layers = derive.attention_layers(tree)
    return "float32" if layers and all(layer.bidirectional for layer in layers) else _USUAL


class WeightSizes(NamedTuple):
    """As in `ModelFacts`; `unknown` is its `unknown_sizes`."""

    parameters: int | None
    bytes: int
    types: Mapping[str, int]
    unknown: str | None


def known_sizes(architecture: str, config: Mapping[str, Any], dtype: str | None) -> KnownSizes:
    """The model of an architecture whose sizes are known, or the reason why they are not.

    `dtype`: that of the checkpoint; None if nothing states it.
    """
    states = "float32" if dtype is not None and dtype not in ITEM_SIZES else dtype
    try:
        tree = trees.tree_for_sizes(architecture, config)
    except UnknownSizes as error:
        return KnownSizes(architecture, None, {}, states or _USUAL, str(error))
    states = states or _usual_dtype(tree)
    return KnownSizes(architecture, tree, registry.text_fields(architecture, config), states, None)


def weight_sizes(
    model: KnownSizes,
    config: Mapping[str, Any],
    dtype: str,
    method: str | None,
    checkpoint: Checkpoint | None,
    types: Mapping[str, int],
) -> WeightSizes:
    """The sizes of weights: of the stored ones, else those that the configuration determines.

    `method`: of quantization. `types`: the stored elements of each dtype. Packed weights have fewer elements than
    parameters, so the architecture tells the number of these; if it is not known, the elements are counted.
    """
    if checkpoint is not None:
        size = sum(tensor.size for tensor in checkpoint.tensors.values())
        known = quantization.find(method)
        packed = method is not None and (known is None or known.packed)
        stored = sum(types.values())
        return WeightSizes(model.parameters if packed and model.known else stored, size, types, None)
    if model.tree is None:
        return WeightSizes(None, 0, {}, model.unknown)
    nested = config.get("text_config")
    stated = config.get("quantization_config") or (nested or {}).get("quantization_config")
    try:
        mapping = registry.weight_mapping(model.architecture)
        found = stored_types(model.tree, dtype, stated if method is not None else None, mapping)
    except UnknownStorage as error:
        return WeightSizes(model.parameters, 0, {}, str(error))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        reason = f"its quantization_config has an invalid value ({type(error).__name__}: {error})"
        return WeightSizes(model.parameters, 0, {}, reason)
    return WeightSizes(model.parameters, stored_bytes(found), found if method is not None else {}, None)
