"""What configurations of models with layers of several kinds are read by: attention, recurrent states, experts.

Torch-free. Raises UnsupportedConfig or InvalidConfig with the name of a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srv.models.layers.moe_config import Routing
from srv.models.unsupported import InvalidConfig, UnsupportedConfig

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


def grouped_routing(config: Mapping[str, Any], count: int) -> Routing:
    """That of DeepSeek-V3 and others: sigmoid scores, a bias for the choice alone, and experts in groups."""
    routing = Routing(
        int(config["num_experts_per_tok"]),
        scoring="sigmoid",
        renormalize=bool(config["norm_topk_prob"]),
        groups=int(config["n_group"]),
        top_groups=int(config["topk_group"]),
        scale=float(config["routed_scaling_factor"]),
        bias=True,
    )
    check_groups(routing, count)
    return routing


def check_groups(routing: Routing, count: int) -> None:
    """Refuse experts that are not in groups of one size, and a choice of more than the best groups have."""
    groups, used = routing.groups, routing.top_groups
    check_experts(routing.top_k, count)
    if groups < 1 or count % groups or not 1 <= used <= groups:
        raise InvalidConfig(f"{count} experts cannot be in n_group = {groups} groups, of which topk_group = {used}")
    if not 1 <= routing.top_k <= count // groups * used:
        most = count // groups * used
        raise InvalidConfig(f"num_experts_per_tok = {routing.top_k} is not between 1 and {most} experts")


def check_experts(used: int, count: int) -> None:
    """Refuse a choice of more experts than there are."""
    if count < 1:
        raise ValueError(f"num_experts_per_tok = {used} of {count} experts")  # the field is found by its value
    if not 0 < used <= count:
        raise InvalidConfig(f"num_experts_per_tok = {used} of {count} experts is not possible")
