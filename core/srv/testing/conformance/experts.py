"""L2 and L3: the experts of layers after loading, with each backend; a small mixture of experts in the real engine."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from srv.models.layers.context import BuildContext
from srv.models.layers.experts import Experts, ExpertSizes, ExpertWeights
from srv.models.layers.moe_config import first_projections
from srv.platform.experts import EXPERTS, FP8, GGUF, INT8, MOE_FAMILY
from srv.platform.ops import Ops, implementations
from srv.quantization.layers.blocks import GGUFExperts
from srv.quantization.layers.fp8 import Fp8Experts
from srv.quantization.layers.int8 import Int8Experts
from srv.quantization.schemes import Fp8
from srv.testing.conformance.facts import MIXTURE
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import engine_under_test
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.ops import VIOLATIONS, contracts
from srv.testing.conformance.setups import backend_specs, declared_dtypes, dtype_of


def loaded(kit: Kit) -> str:
    """Layers of experts with each backend, in each declared dtype, and with each op that the backend has."""
    summaries: list[str] = []
    for spec in backend_specs(kit, MOE_FAMILY):
        added = implementations(spec.ops, kit.device_facts)
        ops = Ops(kit.name, (*added, *kit.platform.ops), experts=spec.name)
        for dtype in map(dtype_of, declared_dtypes(kit)):
            context = BuildContext(kit.device, dtype, ops)
            for op in (EXPERTS, INT8, GGUF, FP8):
                if not context.offers(op, **dict.fromkeys(contracts()[op].sizes, 64)):
                    continue
                sizes: list[ExpertSizes] = []
                layer, name = _layer(kit, context, op, sizes), str(dtype).removeprefix("torch.")
                check = pkgutil.resolve_name(VIOLATIONS)
                problems = check(contracts()[op], layer, dtype, kit.device, capabilities=kit.capabilities)
                if problems:
                    raise Fault(f"{spec.name}, {name}: after post_load, {problems[0]}")
                if not sizes:
                    raise Fault(f"{spec.name}, {name}: it refuses all sizes of the cases of {op}")
                summaries.append(f"{op} of {spec.name} in {name}")
    if not summaries:
        raise NotApplicable("the plugin has no backend of experts")
    return ", ".join(summaries)


def _layer(kit: Kit, context: BuildContext, op: str, sizes_seen: list[ExpertSizes]) -> Callable[..., Tensor]:
    """The op, computed by a layer that is loaded with the operands and passed to `post_load`.

    A model whose sizes the backend of `context` refuses gets another one; those that it takes go to `sizes_seen`.
    """
    any_backend = BuildContext(context.device, context.dtype, Ops(kit.name, kit.platform.ops))

    def run(x: Tensor, ids: Tensor, weights: Tensor, *operands: Any) -> Tensor:
        sizes = _sizes(op, ids.shape[1], operands)
        takes = context.offers(op, **sizes.op_sizes)
        if takes:
            sizes_seen.append(sizes)
        layer = _made(context if takes else any_backend, op, sizes, operands)
        # The biases of experts in GGUF blocks and in FP8 come last, and cases without them leave them out.
        for name, value in zip(layer.operands()[0], operands, strict=op not in (GGUF, FP8)):
            if isinstance(value, Tensor):
                getattr(layer, name).copy_(value)
        kit.platform.post_load(nn.ModuleList([layer]))
        result: Tensor = layer.kernel(x, ids, weights)
        return result

    return run


def _sizes(op: str, top_k: int, operands: tuple[Any, ...]) -> ExpertSizes:
    gate_up, activation = operands[0], operands[6 if op == FP8 else 4]
    down: Tensor = operands[1] if op == EXPERTS else operands[2]
    intermediate = gate_up.shape[1] // len(first_projections(activation))
    return ExpertSizes(gate_up.shape[0], top_k, down.shape[1], intermediate, activation)


def _made(context: BuildContext, op: str, sizes: ExpertSizes, operands: tuple[Any, ...]) -> ExpertWeights:
    """An uninitialised layer for the operands of an op."""
    if op == EXPERTS:
        return Experts(context, "experts", sizes, bias=operands[2] is not None)
    if op == INT8:
        return Int8Experts(context, "experts", sizes)
    if op == FP8:
        return Fp8Experts(context, "experts", sizes, Fp8((operands[4], operands[5])), bias=len(operands) > 7)
    return GGUFExperts(context, "experts", sizes, operands[1], operands[3], bias=len(operands) > 5)


def served(kit: Kit) -> str:
    """Greedy output of a small mixture of experts, in a batch, alone, and with cached prefixes."""
    if not backend_specs(kit, MOE_FAMILY):
        raise NotApplicable("the plugin has no backend of experts")
    with engine_under_test(kit, fields=MIXTURE, disable_graphs=None) as tested:
        prompts = tested.prompts()
        for what in ("greedy output of experts in a batch", "the same with cached prefixes"):
            tested.check(prompts, tested.generate(prompts), what)
        tested.check(prompts[-1:], tested.generate(prompts[-1:]), "greedy output of experts for one request")
        return f"{len(prompts)} prompts in {tested.dtype}"
