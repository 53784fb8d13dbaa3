"""Rules of mixture-of-experts models: how experts are divided, and what balancing them needs."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, Seen

_DEEPEP = "deepep"
_TRIVIAL = "trivial"


def _every_rank(seen: Seen) -> str | None:
    if seen["moe_a2a_backend"] != _DEEPEP or seen["ep_size"] == seen["tp_size"]:
        return None
    return f"DeepEP divides experts among all {seen['tp_size']} ranks (tp_size)"


def _something_to_balance(seen: Seen) -> str | None:
    if not seen["enable_eplb"] or seen["ep_size"] > 1:
        return None
    return "all experts are on one rank (ep_size is 1)"


def _whole_experts(seen: Seen) -> str | None:
    gpt_oss = seen.model is not None and seen.model.architecture == "GptOssForCausalLM"
    if seen["moe_runner_backend"] != "triton_kernel" or seen["ep_size"] == 1 or not gpt_oss:
        return None
    return f"triton_kernel runs this model's experts on one rank only (ep_size is {seen['ep_size']})"


def _long_batches(seen: Seen) -> bool:
    return bool(seen["moe_a2a_backend"] == _DEEPEP and seen["deepep_mode"] == "normal")


def _no_graphs(seen: Seen) -> str | None:
    if not _long_batches(seen) or seen["disable_graphs"]:
        return None
    return "how many tokens DeepEP sends is known only at run time (deepep_mode is normal)"


def _records(seen: Seen) -> str | None:
    return "stat" if seen["enable_eplb"] or seen["enable_expert_distribution_metrics"] else None


def _dispatch(seen: Seen) -> str | None:
    return "static" if seen["enable_eplb"] or seen["init_expert_location"] != _TRIVIAL else None


DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_graphs",
        lambda seen: True if _long_batches(seen) else None,
        "how many tokens DeepEP sends in its normal mode is known only at run time",
        reads=("moe_a2a_backend", "deepep_mode"),
    ),
    Default(
        "ep_size",
        lambda seen: seen["tp_size"] if seen["moe_a2a_backend"] == _DEEPEP else None,
        "DeepEP divides experts among all ranks",
        reads=("moe_a2a_backend", "tp_size"),
    ),
    Default(
        "expert_distribution_recorder_mode",
        _records,
        "balancing and its metrics need to know which experts are used",
        reads=("enable_eplb", "enable_expert_distribution_metrics"),
    ),
    Default(
        "expert_distribution_recorder_buffer_size",
        lambda seen: seen["eplb_rebalance_num_iterations"] if seen["expert_distribution_recorder_mode"] else None,
        "that many steps pass between two moves",
        reads=("eplb_rebalance_num_iterations", "expert_distribution_recorder_mode"),
    ),
    Default(
        "ep_dispatch_algorithm",
        _dispatch,
        "experts may be held more than once, and one of the copies must be chosen",
        reads=("enable_eplb", "init_expert_location"),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "disable_graphs",
        "excluded",
        _no_graphs,
        "Leave it out, or choose deepep_mode low_latency.",
        reads=("moe_a2a_backend", "deepep_mode"),
    ),
    Constraint(
        "ep_size",
        "not_divisible",
        _every_rank,
        "Leave it out, or give it the value of tp_size.",
        reads=("moe_a2a_backend", "tp_size"),
    ),
    Constraint(
        "enable_eplb",
        "other_missing",
        _something_to_balance,
        "Divide the experts with ep_size, or leave it out.",
        reads=("ep_size",),
    ),
    Constraint(
        "moe_runner_backend",
        "excluded",
        _whole_experts,
        "Choose another backend, or set ep_size to 1.",
        reads=("ep_size",),
    ),
)
