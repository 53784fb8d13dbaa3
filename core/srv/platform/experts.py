"""The backends of mixtures of experts: how they relate to ops, and one that any platform may offer. Torch-free.

A backend of the family "moe" is the set of a platform's implementations of `EXPERT_OPS` that have the backend's name;
its `BackendSpec` has no target. Only those of the chosen backend are bound. `route_experts` is an ordinary op. What a
third party adds to a platform has its implementations in `BackendSpec.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from srv.platform.facts import BackendSpec, DeviceFacts, OpCall, OpSpec, Requires, ResolutionContext
from srv.platform.op_choice import too_coarse
from srv.specs import ModelFacts

MOE_FAMILY, MOE_SLOT = "moe", "moe_runner_backend"
ROUTE, EXPERTS, INT8, GGUF = "route_experts", "experts", "experts_int8", "experts_gguf"
FP8 = "experts_fp8"
EXPERT_OPS = (EXPERTS, INT8, GGUF, FP8)
# The op of a quantized layer -> that of experts whose projections would be such layers.
EXPERT_OP_OF: Mapping[str, str] = {
    **{"": EXPERTS, "linear_w8a8": INT8, "linear_int8": INT8},
    **{"linear_gguf": GGUF, "linear_fp8": FP8},
}
TORCH_NATIVE = "torch_native"
MXFP4_PRECISION = "mxfp4_moe_precision"  # read by backends that do not round the activations of GGUF's blocks
_MODULE = "srv_kernels.expert_reference"

Check = Callable[[DeviceFacts, OpCall], str | None]


def _fits(context: ResolutionContext) -> Requires:
    return Requires()


# PyTorch's operators. The number of tokens of each expert is read on the host, so that steps cannot be captured.
TORCH_EXPERTS = BackendSpec(
    name=TORCH_NATIVE, priority=0, check=_fits, target="", arguments=(MXFP4_PRECISION,), fallback=True
)


def torch_expert_ops(check: Check, ops: Collection[str] = EXPERT_OPS) -> tuple[OpSpec, ...]:
    """The ops of `TORCH_EXPERTS` for a platform whose device has all of PyTorch's operators, to be listed last.

    `check`: of dtypes. `ops`: those of `EXPERT_OPS` that it offers.
    """
    return tuple(OpSpec(op, TORCH_NATIVE, check, f"{_MODULE}:{op}", fallback=True) for op in (ROUTE, *ops))


def of_backend(specs: Iterable[OpSpec], backend: str) -> tuple[OpSpec, ...]:
    """The specs of a platform without those of experts that belong to other backends."""
    return tuple(spec for spec in specs if spec.op not in EXPERT_OPS or spec.name == backend)


def with_added(specs: Sequence[OpSpec], backends: Iterable[BackendSpec]) -> tuple[OpSpec, ...]:
    """The specs of a platform after those that backends of third parties add."""
    return (*(spec for backend in backends for spec in backend.ops), *specs)


def missing_ops(specs: Iterable[OpSpec], backend: str, needed: Iterable[str], *, full: bool = False) -> tuple[str, ...]:
    """Clauses that name the ops that a backend lacks. `full`: as of `choose_op`."""
    rounds_by_op = {spec.op: spec.rounds for spec in specs if spec.name == backend}
    lacking = (f"it has no {op}, which the experts of this model need" for op in needed if op not in rounds_by_op)
    coarse = (too_coarse(rounds_by_op[op], full=full) for op in needed if op in rounds_by_op)
    return (*lacking, *(clause for clause in coarse if clause is not None))


def needed_ops(
    model: ModelFacts, values: Mapping[str, Any], capabilities: Collection[str], layer_ops: Collection[str] = ()
) -> tuple[str, ...]:
    """The ops that a model's experts may need. `values`: what the user set.

    `layer_ops`: those of a quantization method whose weights are not dequantized. Both of those for quantized and for
    dequantized weights, if a platform's default may decide between them.
    """
    if layer_ops:
        return tuple(EXPERT_OP_OF[op] for op in layer_ops if op in EXPERT_OP_OF)
    if model.stored_types.get("int8") and not values.get("dequantize_weights"):
        return (INT8,)
    blocks = model.format == "gguf" and model.quantization is not None and "gguf_blocks" in capabilities
    if not blocks or values.get("dequantize_weights") or values.get("load_format") == "dummy":
        return (EXPERTS,)
    return (GGUF,) if values.get("dequantize_weights") is False else (GGUF, EXPERTS)
