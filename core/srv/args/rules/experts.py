"""Rules for mixture-of-experts models: expert parallelism and load balancing."""

from __future__ import annotations

from srv.models.facts.special_layers import mixture
from srv.platform.facts import Constraint, Default, ResolutionContext

_DEEPEP = "deepep"
_TRIVIAL = "trivial"
_COUNTED = "a captured step would not count the tokens of its experts"


def _deepep_needs_all_ranks(context: ResolutionContext) -> str | None:
    if context["moe_a2a_backend"] != _DEEPEP or context["ep_size"] == context["tp_size"]:
        return None
    return f"DeepEP distributes the experts over all {context['tp_size']} ranks (tp_size)"


def _eplb_needs_ranks(context: ResolutionContext) -> str | None:
    if not context["enable_eplb"] or context["ep_size"] > 1:
        return None
    return "all experts are on one rank (ep_size is 1)"


def _needs_experts(argument: str, unset: object) -> Constraint:
    """A value other than `unset` is refused for models without experts that native layers compute."""

    def reason(context: ResolutionContext) -> str | None:
        if context.model is None or context[argument] == unset:
            return None
        if mixture(context.model, {"model_impl": context["model_impl"]}) is not None:
            return None
        return f"{context.model.name} has no experts that native layers compute"

    remedy = "Leave it out, or serve a model with experts."
    return Constraint(argument, "inert", reason, remedy, reads=("model_impl",))


def _ranks_divide(context: ResolutionContext) -> str | None:
    parts, ranks = context["ep_size"], context["tp_size"]
    return None if ranks % parts == 0 else f"{ranks} ranks (tp_size) cannot be divided into {parts} groups"


def _deepep_normal_mode(context: ResolutionContext) -> bool:
    return bool(context["moe_a2a_backend"] == _DEEPEP and context["deepep_mode"] == "normal")


def _no_graphs_with_deepep_normal(context: ResolutionContext) -> str | None:
    if not _deepep_normal_mode(context) or context["disable_graphs"]:
        return None
    return "the number of tokens that DeepEP sends is known only at run time (deepep_mode is normal)"


def _no_graphs_with_metrics(context: ResolutionContext) -> str | None:
    if not context["enable_expert_distribution_metrics"] or context["disable_graphs"]:
        return None
    return f"{_COUNTED} (enable_expert_distribution_metrics is true)"


def _no_compiled_steps_with_metrics(context: ResolutionContext) -> str | None:
    if not context["enable_expert_distribution_metrics"] or not context["enable_torch_compile"]:
        return None
    return "a compiled step would not count the tokens of its experts (enable_torch_compile is true)"


def _recorder_mode(context: ResolutionContext) -> str | None:
    return "stat" if context["enable_eplb"] or context["enable_expert_distribution_metrics"] else None


def _dispatch_algorithm(context: ResolutionContext) -> str | None:
    return "static" if context["enable_eplb"] or context["init_expert_location"] != _TRIVIAL else None


DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_graphs",
        lambda context: True if _deepep_normal_mode(context) else None,
        "the number of tokens that DeepEP sends in its normal mode is known only at run time",
        reads=("moe_a2a_backend", "deepep_mode"),
    ),
    Default(
        "disable_graphs",
        lambda context: True if context["enable_expert_distribution_metrics"] else None,
        _COUNTED,
        reads=("enable_expert_distribution_metrics",),
    ),
    Default(
        "ep_size",
        lambda context: context["tp_size"] if context["moe_a2a_backend"] == _DEEPEP else None,
        "DeepEP distributes the experts over all ranks",
        reads=("moe_a2a_backend", "tp_size"),
    ),
    Default(
        "expert_distribution_recorder_mode",
        _recorder_mode,
        "load balancing and its metrics need records of which experts are used",
        reads=("enable_eplb", "enable_expert_distribution_metrics"),
    ),
    Default(
        "expert_distribution_recorder_buffer_size",
        lambda context: (
            context["eplb_rebalance_num_iterations"] if context["expert_distribution_recorder_mode"] else None
        ),
        "it is the number of steps between two rebalancings",
        reads=("eplb_rebalance_num_iterations", "expert_distribution_recorder_mode"),
    ),
    Default(
        "ep_dispatch_algorithm",
        _dispatch_algorithm,
        "an expert may have several copies, and one of them must be chosen for each token",
        reads=("enable_eplb", "init_expert_location"),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "disable_graphs",
        "excluded",
        _no_graphs_with_deepep_normal,
        "Leave it out, or set deepep_mode to low_latency.",
        reads=("moe_a2a_backend", "deepep_mode"),
    ),
    Constraint(
        "disable_graphs",
        "excluded",
        _no_graphs_with_metrics,
        "Leave it out, or set it to true.",
        reads=("enable_expert_distribution_metrics",),
    ),
    Constraint(
        "enable_expert_distribution_metrics",
        "excluded",
        _no_compiled_steps_with_metrics,
        "Leave one of the two out.",
        reads=("enable_torch_compile",),
    ),
    Constraint("ep_size", "not_divisible", _ranks_divide, "Choose a divisor of tp_size.", reads=("tp_size",)),
    Constraint(
        "ep_size",
        "not_divisible",
        _deepep_needs_all_ranks,
        "Leave it out, or set it to the value of tp_size.",
        reads=("moe_a2a_backend", "tp_size"),
    ),
    Constraint(
        "enable_eplb",
        "other_missing",
        _eplb_needs_ranks,
        "Distribute the experts with ep_size, or leave it out.",
        reads=("ep_size",),
    ),
)

USER_CONSTRAINTS: tuple[Constraint, ...] = (
    _needs_experts("ep_size", 1),
    _needs_experts("moe_runner_backend", "auto"),
    _needs_experts("expert_distribution_recorder_mode", None),
    _needs_experts("enable_expert_distribution_metrics", False),
)
