"""Rules for models with recurrent layers: what cannot be combined with their states, and values without effect.

A state cannot go back, so tokens that may be rejected must not advance it; and its layers mix the tokens of a row, so
they can neither be captured in pieces nor traced like layers that compute each token by itself.
"""

from __future__ import annotations

from srv.args.groups.memory import MemoryArgs
from srv.platform.facts import Constraint, ResolutionContext
from srv.specs import Recurrent

_DEFAULTS = MemoryArgs()
_ARGUMENTS = ("max_mamba_cache_size", "mamba_ssm_dtype", "mamba_full_memory_ratio", "mamba_track_interval")


def _is_recurrent(context: ResolutionContext) -> bool:
    return context.model is not None and any(isinstance(group, Recurrent) for group in context.model.cache_groups)


def _excluded(argument: str, why: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        return why if context[argument] and _is_recurrent(context) else None

    return Constraint(argument, "excluded", check, "Leave it out, or choose a model whose layers all use attention.")


def _fewer_states_than_requests(context: ResolutionContext) -> str | None:
    states, running = context["max_mamba_cache_size"], context["max_running_requests"]
    if states is None or states >= running or not _is_recurrent(context):
        return None
    return f"each of the {running} running requests has a state (max_running_requests)"


def _without_states(argument: str) -> Constraint:
    default = getattr(_DEFAULTS, argument)

    def check(context: ResolutionContext) -> str | None:
        if context.model is None or context[argument] == default or _is_recurrent(context):
            return None
        return "no layer of the model keeps a recurrent state"

    return Constraint(argument, "inert", check, "Leave it out.")


def _no_saved_states(argument: str) -> Constraint:
    default = getattr(_DEFAULTS, argument)

    def check(context: ResolutionContext) -> str | None:
        if not _is_recurrent(context) or context[argument] == default or not context["disable_radix_cache"]:
            return None
        return "without a prefix cache only the states of running requests are kept (disable_radix_cache is true)"

    return Constraint(argument, "inert", check, "Leave one of the two out.", reads=("disable_radix_cache",))


def _size_is_set(context: ResolutionContext) -> str | None:
    default, size = _DEFAULTS.mamba_full_memory_ratio, context["max_mamba_cache_size"]
    if not _is_recurrent(context) or context["mamba_full_memory_ratio"] == default or size is None:
        return None
    return f"the number of states is {size} (max_mamba_cache_size)"


CONSTRAINTS: tuple[Constraint, ...] = (
    _excluded(
        "speculative_algorithm", "the model keeps recurrent states, which drafts that are rejected would have advanced"
    ),
    _excluded(
        "calculate_kv_scales",
        "the tokens from which scales are calculated have no recurrent states, which this model reads",
    ),
    _excluded("enable_torch_compile", "recurrent layers, which this model has, are not traced by torch.compile"),
    _excluded(
        "enable_piecewise_graphs",
        "recurrent layers, which this model has, mix tokens, and are not cut out of them",
    ),
    Constraint(
        "max_mamba_cache_size",
        "out_of_order",
        _fewer_states_than_requests,
        "Raise it, or lower --max-running-requests.",
        reads=("max_running_requests",),
    ),
)

# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = (
    *map(_without_states, _ARGUMENTS),
    *map(_no_saved_states, ("max_mamba_cache_size", "mamba_full_memory_ratio", "mamba_track_interval")),
    Constraint(
        "mamba_full_memory_ratio", "inert", _size_is_set, "Leave one of the two out.", reads=("max_mamba_cache_size",)
    ),
)
