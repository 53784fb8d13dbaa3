"""Rules of parallelism: sizes that must divide one another, and what does not work together."""

from __future__ import annotations

from srv.args.rules.reserve import RESERVED_MEMORY
from srv.platform.facts import Constraint, Contribution, Default, Seen

_GIB = 2**30


def _machines_divide(seen: Seen) -> str | None:
    ranks, machines = seen["tp_size"] * seen["pp_size"], seen["nnodes"]
    if ranks % machines == 0:
        return None
    return f"{ranks} ranks (tp_size x pp_size) cannot be divided among {machines} machines"


def _rank_exists(seen: Seen) -> str | None:
    rank, machines = seen["node_rank"], seen["nnodes"]
    return None if rank < machines else f"{machines} machines have the ranks 0 to {machines - 1}"


def _pipeline_alone(seen: Seen) -> str | None:
    if seen["pp_size"] == 1:
        return None
    if not seen["disable_overlap_schedule"]:
        return "a pipeline's stages cannot overlap with planning (disable_overlap_schedule is false)"
    if seen["speculative_algorithm"] is not None:
        return f"a pipeline cannot check guesses (speculative_algorithm is {seen['speculative_algorithm']})"
    return None


def _replicas_on_one_machine(seen: Seen) -> str | None:
    if seen["dp_size"] == 1 or seen["nnodes"] == 1 or seen["enable_dp_attention"]:
        return None
    return f"replicas on {seen['nnodes']} machines need enable_dp_attention"


def _attention_divides(seen: Seen) -> str | None:
    if not seen["enable_dp_attention"]:
        return None
    ranks, replicas = seen["tp_size"], seen["dp_size"]
    if replicas == 1:
        return "with one replica there is nothing to divide (dp_size is 1)"
    return None if ranks % replicas == 0 else f"{ranks} ranks (tp_size) cannot be divided by {replicas} (dp_size)"


def _head_needs_attention(seen: Seen) -> str | None:
    if not seen["enable_dp_lm_head"] or seen["enable_dp_attention"]:
        return None
    return "it divides the groups that enable_dp_attention makes, and that is false"


DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_overlap_schedule",
        lambda seen: True if seen["pp_size"] > 1 else None,
        "a pipeline's stages cannot overlap with planning",
        reads=("pp_size",),
    ),
    Default(
        "schedule_conservativeness",
        lambda seen: 0.3 if seen["enable_dp_attention"] else None,
        "each replica of data-parallel attention has a pool of its own, and few requests to fill it",
        reads=("enable_dp_attention",),
    ),
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "dp_attention",
        lambda seen: 4.0 * _GIB if seen["enable_dp_attention"] else 0.0,
        "data-parallel attention gathers the tokens of all replicas",
        reads=("enable_dp_attention",),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "nnodes",
        "not_divisible",
        _machines_divide,
        "Give a number of ranks that is a multiple of the machines.",
        reads=("tp_size", "pp_size"),
    ),
    Constraint("node_rank", "rank_missing", _rank_exists, "Number the machines from 0.", reads=("nnodes",)),
    Constraint(
        "pp_size",
        "excluded",
        _pipeline_alone,
        "Leave the other out, or set pp_size to 1.",
        reads=("disable_overlap_schedule", "speculative_algorithm"),
    ),
    Constraint(
        "dp_size",
        "excluded",
        _replicas_on_one_machine,
        "Start one server a machine, or set enable_dp_attention.",
        reads=("nnodes", "enable_dp_attention"),
    ),
    Constraint(
        "enable_dp_attention",
        "not_divisible",
        _attention_divides,
        "Give a tp_size that is a multiple of a dp_size above 1.",
        reads=("tp_size", "dp_size"),
    ),
    Constraint(
        "enable_dp_lm_head",
        "other_missing",
        _head_needs_attention,
        "Set enable_dp_attention too, or leave it out.",
        reads=("enable_dp_attention",),
    ),
)
