"""What configurations of models with attention in some layers, and recurrent states in the others, are read by.

Torch-free. Raises UnsupportedConfig with the name of a field.
"""

from __future__ import annotations

from collections.abc import Sequence

from srv.models.unsupported import UnsupportedConfig

ATTENTION, SLIDING = "full_attention", "sliding_attention"


def has_attention(types: Sequence[str], kinds: Sequence[str], layers: int) -> tuple[bool, ...]:
    """Whether each layer has attention. `types`: the value of `layer_types`; `kinds`: those that layers may be."""
    unknown = sorted(set(types) - set(kinds))
    if unknown:
        raise UnsupportedConfig(f"layer_types contains the unknown {', '.join(map(repr, unknown))}")
    if len(types) != layers:
        raise UnsupportedConfig(f"layer_types has {len(types)} entries for {layers} layers")
    attention = [kind for kind in kinds if kind in (ATTENTION, SLIDING)]
    if not any(each in attention for each in types):
        raise UnsupportedConfig(f"layer_types has no layer of {' or '.join(attention)}")
    return tuple(each in attention for each in types)


def check_experts(used: int, count: int) -> None:
    """Refuse a choice of more experts than there are."""
    if not 0 < used <= count:
        raise UnsupportedConfig(f"num_experts_per_tok = {used} of {count} experts is not possible")
