"""The routing of a mixture of experts, as data, and the names of experts. Torch-free: `srv plan` reads them."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "swiglu_clamped", "silu_clamped", "relu2"]
Scoring: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_top_k", "sparse_mixer"]
UNGATED: tuple[ExpertActivation, ...] = ("relu2",)  # of `up` alone; the others are those of a gate, times `up`
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
SPARSE_MIXER = "sparse_mixer"  # which is no scoring of the op `route_experts`
JITTER = 0.01  # of "sparse_mixer"
ROUTER = "router"  # the value of `OpLayer.role` for the layer whose results choose experts
COUNT_FIELDS = ("num_experts", "num_local_experts")  # the names that configurations have for the number of experts


class Routing(NamedTuple):
    """How a token's experts are chosen and weighted: the arguments of the op `route_experts`, unless it is SparseMixer.

    `bias`: whether a learned bias is added to the scores for the choice.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False


def first_projections(activation: ExpertActivation) -> tuple[str, ...]:
    """Those of an expert whose results its activation takes: the gate and `up`, or `up` alone."""
    return (UP,) if activation in UNGATED else (GATE, UP)


def expert_names(prefix: str, experts: int, activation: ExpertActivation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the projections of all experts of a layer: `first_projections`; down_proj."""
    each = [f"{prefix}.{expert}" for expert in range(experts)]
    gate_up = tuple(f"{name}.{part}" for name in each for part in first_projections(activation))
    return gate_up, tuple(f"{name}.{DOWN}" for name in each)
