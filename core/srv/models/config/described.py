"""What `srv.models.sizes` says of a Hugging Face folder, and what follows for its facts. Torch-free.

A model whose architecture is not known has no sizes but those of its stored weights: nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from srv.dtypes import ITEM_SIZES
from srv.models.architectures.registry import native_or_reason
from srv.models.config.limits import MAX_SIZE
from srv.models.formats.safetensors_header import Checkpoint
from srv.models.sizes import parts
from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import Part, UnknownSizes
from srv.models.sizes.registry import FAMILIES, describe
from srv.models.sizes.stored import stored_bytes, stored_types
from srv.quantization import registry as quantization
from srv.specs import AttentionSpec, CacheSpec, FullAttention, Latent

# The fields of the quantities that a configuration may leave out.
DEFAULTED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
_DEFAULTS_WITHOUT_ATTENTION = {"heads": 1, "context": MAX_SIZE}
UNKNOWN_REMEDY = "download the weights, whose files say their exact size"


class DescribedModel(NamedTuple):
    """`part`: the model's weights and caches; None if they are not known, for the reason `unknown`.

    `fields`: those of its language model, with defaults.
    """

    architecture: str
    part: Part | None
    fields: Fields | None
    unknown: str | None

    @property
    def known(self) -> bool:
        return self.part is not None

    @property
    def keeps_other_states(self) -> bool:
        """Whether some layers keep something else than keys and values per head."""
        return self.part is not None and any(not isinstance(each, AttentionSpec) for each in self.part.caches)

    @property
    def parameters(self) -> int | None:
        return None if self.part is None else self.part.parameters

    @property
    def active_parameters(self) -> int | None:
        return None if self.part is None else self.part.active_parameters

    def cache_groups(self, context: int) -> tuple[CacheSpec, ...]:
        return () if self.part is None else parts.cache_groups(self.part, context)

    def pool_groups(self, context: int) -> tuple[CacheSpec, ...]:
        """The cache groups as the class of transformers fills them, if it serves the model: plain keys and values.

        Latent attention computes these for every head, and values have the room of keys.
        """
        groups = self.cache_groups(context)
        family = FAMILIES.get(self.architecture)
        if family is None or not family.transformers or self.fields is None:
            return groups
        return tuple(_plain(group, self.fields) for group in groups)

    def default(self, quantity: str) -> Any:
        """The value of a quantity that the configuration leaves out.

        Models without attention have one head, and any context: nothing that they keep grows with it.
        """
        if self.part is None or self.fields is None:
            return None
        value = self.fields.get(DEFAULTED[quantity])
        return _DEFAULTS_WITHOUT_ATTENTION.get(quantity) if value is None and not self._has_attention() else value

    def head_sizes(self) -> dict[str, int]:
        """The KV heads, and the size of a head, where attention is known."""
        caches = () if self.part is None else self.part.caches
        for cache in caches:
            if isinstance(cache, AttentionSpec):
                return {"kv_heads": cache.kv_heads, "head_dim": cache.key_dim}
            if isinstance(cache, Latent) and self.fields is not None:
                return {"head_dim": int(self.fields.qk_nope_head_dim + cache.rope_dim)}
        return {}

    def _has_attention(self) -> bool:
        return self.part is not None and any(isinstance(each, AttentionSpec | Latent) for each in self.part.caches)


def _plain(group: CacheSpec, fields: Fields) -> CacheSpec:
    if isinstance(group, Latent):
        size = max(int(fields.qk_nope_head_dim + group.rope_dim), int(fields.v_head_dim))
        return FullAttention(group.layers, int(fields.num_attention_heads), size, size)
    if isinstance(group, AttentionSpec):
        size = max(group.key_dim, group.value_dim)
        return msgspec.structs.replace(group, key_dim=size, value_dim=size)
    return group


class WeightSizes(NamedTuple):
    """As in `ModelFacts`; `unknown` is its `unknown_sizes`."""

    parameters: int | None
    bytes: int
    types: Mapping[str, int]
    unknown: str | None


def described(architecture: str, config: Mapping[str, Any], dtype: str) -> DescribedModel:
    """The model of an architecture whose sizes are known, or the reason why they are not."""
    states = dtype if dtype in ITEM_SIZES else "float32"
    family = FAMILIES.get(architecture)
    try:
        part = describe(architecture, config, states)
    except UnknownSizes as error:
        return DescribedModel(architecture, None, None, str(error))
    fields = Fields(config, family.model_type, states) if family else None
    nested = family.text_type if family else None
    return DescribedModel(architecture, part, fields.part("text_config", nested) if fields and nested else fields, None)


def _native_parameters(architecture: str, config: Mapping[str, Any]) -> int | None:
    """Of an architecture with native layers; None if there is none, or if it refuses the configuration."""
    native = native_or_reason(architecture, config)
    return None if isinstance(native, str) else native.parameters


def _native_sizes(model: DescribedModel, config: Mapping[str, Any], dtype: str, method: str | None) -> WeightSizes:
    """Of a model that only its native layers can count: those of another distribution."""
    count = None if model.architecture in FAMILIES else _native_parameters(model.architecture, config)
    if count is None:
        return WeightSizes(None, 0, {}, f"{model.unknown}; {UNKNOWN_REMEDY}")
    if method is None and dtype in ITEM_SIZES:
        return WeightSizes(count, count * ITEM_SIZES[dtype], {}, None)
    form = f"that are quantized with {method}" if method is not None else f"in {dtype}"
    unknown = f"the sizes of weights of {model.architecture} {form} are not known: no size is claimed"
    return WeightSizes(count, 0, {}, f"{unknown}; {UNKNOWN_REMEDY}")


def weight_sizes(
    model: DescribedModel,
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
    if model.part is None:
        return _native_sizes(model, config, dtype, method)
    nested = config.get("text_config")
    stated = config.get("quantization_config") or (nested or {}).get("quantization_config")
    try:
        found = stored_types(model.part, dtype, stated if method is not None else None)
    except UnknownSizes as error:
        return WeightSizes(model.parameters, 0, {}, f"{error}; {UNKNOWN_REMEDY}")
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        reason = f"its quantization_config has an invalid value ({type(error).__name__}: {error}): no size is claimed"
        return WeightSizes(model.parameters, 0, {}, f"{reason}; {UNKNOWN_REMEDY}")
    return WeightSizes(model.parameters, stored_bytes(found), found if method is not None else {}, None)
