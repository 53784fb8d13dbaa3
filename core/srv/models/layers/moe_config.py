"""The sizes and the routing of a mixture of experts, as data. Torch-free: `srv plan` reads them."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "swiglu_clamped", "silu_clamped"]
Scoring: TypeAlias = Literal["softmax", "sigmoid", "softmax_of_top_k"]
ROUTER = "router"  # the value of `OpLayer.role` for the layer whose results choose experts
_FLOAT32 = 4  # bytes
_PER_CHOICE = 7 * _FLOAT32  # bytes per expert that a token can choose
COUNT_FIELDS = ("num_experts", "num_local_experts")  # the names that configurations have for the number of experts


class Routing(NamedTuple):
    """How a token's experts are chosen and weighted: the arguments of the op `route_experts`.

    `bias`: whether a learned bias is added to the scores for the choice.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias: bool = False


class MoEConfig(NamedTuple):
    """The mixture of experts of a layer.

    `experts`: their number. `intermediate`: the size of each. `shared_intermediate`: that of the shared expert, 0 if
    there is none; `shared_gate`: its result is multiplied by a sigmoid. `router` and `shared`: the names of these
    layers within the MLP in checkpoints. `expert_bias`: whether the projections of the experts have biases;
    `router_bias`: whether the router has one. `scales_inputs`: the weight of an expert multiplies its inputs, not its
    result (Llama 4).
    """

    experts: int
    intermediate: int
    routing: Routing
    shared_intermediate: int = 0
    shared_gate: bool = False
    activation: ExpertActivation = "silu"
    router: str = "gate"
    shared: str = "shared_expert"
    expert_bias: bool = False
    router_bias: bool = False
    scales_inputs: bool = False

    def step_bytes(self, hidden: int, item: int) -> int:
        """Bytes of temporary tensors per token, at most; `item`: bytes per element of the model's dtype.

        Each of a token's experts has a row of its gate, of `up`, of their product and of its result, which some
        implementations keep in float32. Beside them are the shared expert, and logits, scores and their order.
        """
        rows = self.routing.top_k * (3 * self.intermediate + hidden) * _FLOAT32
        rows += self.routing.top_k * 2 * hidden * item * self.scales_inputs
        return rows + 3 * self.shared_intermediate * item + _PER_CHOICE * self.experts


def expert_names(prefix: str, experts: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the projections of all experts of a layer: gate_proj and up_proj; down_proj."""
    each = [f"{prefix}.{expert}" for expert in range(experts)]
    gate_up = tuple(f"{name}.{part}" for name in each for part in ("gate_proj", "up_proj"))
    return gate_up, tuple(f"{name}.down_proj" for name in each)
