"""Fields of a model's configuration that the user replaces (`--json-model-override-args`). Torch-free.

Owns which fields may be replaced: those that the configuration has, and those that its class would have. Any other name
is refused, because a typing error would have no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from srv.errors import ModelError
from srv.models.config.field_types import (
    COUNTS,
    DIVISORS,
    EPSILONS,
    NUMBERS,
    ROPE_KEYS,
    STRINGS,
    check_fields,
    check_own_fields,
)
from srv.models.families.builders.decoder_fields import UNSUPPORTED_UNLESS
from srv.models.families.registry import class_of_type, field_names, named_class
from srv.models.options import IN_ROPE, NESTED, ROPE, merged, rope_by_kind

OPTION = "--json-model-override-args"
# Fields that configurations of many classes leave out.
_COMMON = (
    "architectures",
    "attention_bias",
    "eos_token_id",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
)


def overridden(path: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values of some fields, also where it nests them for its language model.

    `path`: of the model, for messages. Raises ModelError: unknown_override for a name that is no field of the
    configuration, and unsupported_config for a value of a wrong type, or one value of RoPE for several kinds of layers.
    """
    if not overrides:
        return dict(config)
    nested = config.get(NESTED)
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    known = _known({**config, **inner})
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1)
            reason = f"{name!r} in {OPTION} is no field of its configuration"
            remedy = f"Did you mean {close[0]!r}?" if close else "Correct the name, or leave the field out"
            raise ModelError("unknown_override", path, reason, remedy)
    check_fields(f"{OPTION} of {path}", overrides)
    if (architecture := named_class(config) or class_of_type(config.get("model_type"))) is not None:
        check_own_fields(f"{OPTION} of {path}", architecture, overrides)
    by_kind = ROPE not in overrides and (rope_by_kind(config) or rope_by_kind(inner))
    if by_kind and (given := [name for name in IN_ROPE if name in overrides]):
        reason = f"{given[0]!r} in {OPTION} is one value, but its {ROPE} differ between kinds of layers"
        raise ModelError("unsupported_config", path, reason, f"Override {ROPE} as a whole")
    return merged(config, overrides)


def _known(config: Mapping[str, Any]) -> set[str]:
    """The names of the fields that a configuration has, or that its class would have."""
    return {
        *config,
        *_COMMON,
        *COUNTS,
        *NUMBERS,
        *DIVISORS,
        *EPSILONS,
        *STRINGS,
        *ROPE_KEYS,
        *UNSUPPORTED_UNLESS,
        *field_names(named_class(config)),
        *field_names(class_of_type(config.get("model_type"))),
    }
