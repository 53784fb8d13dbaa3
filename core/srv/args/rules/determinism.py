"""Rules for deterministic inference: what is not known to give a request the same bits in any batch is refused.

The platform's capability and the backends' declarations are checked where they are chosen (`srv.args.backends`).
"""

from __future__ import annotations

from srv.models.families.trees import native_tree_of_model
from srv.platform.facts import Constraint, ResolutionContext


def _native_layers(context: ResolutionContext) -> str | None:
    """The layers of transformers multiply by torch's operators, which choose an algorithm by the number of rows."""
    model = context.model
    if not context["enable_deterministic_inference"] or model is None:
        return None
    why = "torch's operators, which it would use, choose their order of summation by the number of rows"
    if context["model_impl"] == "transformers":
        return f"{why} (model_impl is transformers)"
    if isinstance(native_tree_of_model(model), str):
        return f"{why} ({model.architecture} has no native layers for this configuration)"
    return None


def _one_rank(context: ResolutionContext) -> str | None:
    if not context["enable_deterministic_inference"] or context["tp_size"] == 1:
        return None
    return f"sums over {context['tp_size']} ranks (tp_size) are not known to be independent of the number of rows"


def _not_compiled(context: ResolutionContext) -> str | None:
    if not (context["enable_deterministic_inference"] and context["enable_torch_compile"]):
        return None
    return "compiled steps (enable_torch_compile) add in another order than the steps that are not compiled"


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "enable_deterministic_inference",
        "not_invariant",
        _native_layers,
        "Leave it out, or choose a model with native layers.",
        reads=("model_impl",),
    ),
    Constraint(
        "enable_deterministic_inference", "not_invariant", _one_rank, "Leave one of the two out.", reads=("tp_size",)
    ),
    Constraint(
        "enable_deterministic_inference",
        "not_invariant",
        _not_compiled,
        "Leave one of the two out.",
        reads=("enable_torch_compile",),
    ),
)
