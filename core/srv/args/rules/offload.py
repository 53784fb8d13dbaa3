"""Rules for weights in host memory: which devices have such layers, and what does not go with them.

Which layers these are, and whether anything is saved, follows from the model (`srv.planning.offload`).
"""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, ResolutionContext

_ARGUMENTS = ("host_offload_gb", "offload_group_size")


def _is_on(context: ResolutionContext) -> bool:
    return bool(context["host_offload_gb"] > 0 or context["offload_group_size"] > 0)


def _moves_weights(context: ResolutionContext, argument: str) -> bool:
    return bool(context[argument] > 0)


def _two_ways(context: ResolutionContext) -> str | None:
    if context["host_offload_gb"] <= 0 or context["offload_group_size"] <= 0:
        return None
    return f"host_offload_gb ({context['host_offload_gb']}) chooses the layers already"


def _within_group(context: ResolutionContext) -> str | None:
    size, count = context["offload_group_size"], context["offload_num_in_group"]
    return f"offload_group_size is {size}" if 0 < size < count else None


def _not_captured(context: ResolutionContext) -> str | None:
    if context["disable_graphs"] or not _is_on(context):
        return None
    return "a captured step would not copy the weights that are in host memory"


def _with(argument: str) -> tuple[Constraint, ...]:
    """What an argument that moves weights does not go with."""

    def one_rank(context: ResolutionContext) -> str | None:
        ranks = context["tp_size"]
        if ranks == 1 or not _moves_weights(context, argument):
            return None
        return f"weights that are divided among {ranks} ranks (tp_size) stay on the devices"

    def not_compiled(context: ResolutionContext) -> str | None:
        if not context["enable_torch_compile"] or not _moves_weights(context, argument):
            return None
        return "a compiled step would not copy the weights that are in host memory (enable_torch_compile is true)"

    return (
        Constraint(argument, "excluded", one_rank, "Leave one of the two out.", reads=("tp_size",)),
        Constraint(argument, "excluded", not_compiled, "Leave one of the two out.", reads=("enable_torch_compile",)),
    )


def _device_memory(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        if "host_memory" not in context.capabilities or not _moves_weights(context, argument):
            return None
        return "the device computes in host memory (capability host_memory), where its weights are already"

    return Constraint(argument, "unsupported", check, "Leave it out.")


DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_graphs",
        lambda context: True if _is_on(context) else None,
        "a captured step would not copy the weights that are in host memory",
        reads=_ARGUMENTS,
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("offload_group_size", "excluded", _two_ways, "Leave one of the two out.", reads=("host_offload_gb",)),
    Constraint(
        "offload_num_in_group",
        "out_of_order",
        _within_group,
        "Lower it, or raise offload_group_size.",
        reads=("offload_group_size",),
    ),
    Constraint("disable_graphs", "excluded", _not_captured, "Leave it out, or set it to true.", reads=_ARGUMENTS),
    *(constraint for argument in _ARGUMENTS for constraint in _with(argument)),
)

DEVICE_CONSTRAINTS: tuple[Constraint, ...] = tuple(map(_device_memory, _ARGUMENTS))
