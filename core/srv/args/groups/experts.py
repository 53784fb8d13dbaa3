"""Arguments of mixture-of-experts models: who holds which expert, and how tokens get there."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, at_least_or, between, not_empty, one_of
from srv.args.spec import Arg

_MOE = "mixture-of-experts models are not implemented yet"
_EP = "expert parallelism is not implemented yet"
_BALANCE = "balancing experts among ranks is not implemented yet"


class ExpertsArgs(NamedTuple):
    """Where experts run, through which backends, and how their load is balanced."""

    ep_size: Annotated[
        int,
        Arg(
            "Ranks among which the experts are divided.",
            at_least(1),
            planned=_EP,
            metavar="RANKS",
            aliases=("expert_parallel_size", "ep"),
        ),
    ] = 1
    moe_a2a_backend: Annotated[
        str, Arg("Backend that carries tokens to their experts' ranks.", not_empty(), planned=_EP, metavar="NAME")
    ] = "none"
    moe_runner_backend: Annotated[
        str, Arg("Backend that runs the experts.", not_empty(), planned=_MOE, family="moe", metavar="NAME")
    ] = "auto"
    mxfp4_moe_precision: Annotated[
        Literal["default", "bf16"], Arg("Type of activations for experts in MXFP4.", planned=_MOE)
    ] = "default"
    disable_moe_fp4_allgather: Annotated[
        bool, Arg("Gather tokens of FP4 experts before they are quantized, not after.", planned=_EP)
    ] = False
    disable_shared_experts_fusion: Annotated[
        bool, Arg("Run the experts that see every token apart from the others.", planned=_MOE)
    ] = False
    deepep_mode: Annotated[
        Literal["normal", "low_latency", "auto"],
        Arg("DeepEP's way for long or for short batches; auto takes low_latency for output only.", planned=_EP),
    ] = "auto"
    deepep_config: Annotated[
        str | None,
        Arg("Tuned settings of DeepEP: JSON, or a file of it.", not_empty(), planned=_EP, metavar="JSON_OR_PATH"),
    ] = None
    moe_dense_tp_size: Annotated[
        int | None,
        Arg(
            "Ranks that share the dense layers of such a model; all of them if not set.",
            one_of(1),
            planned=_MOE,
            metavar="RANKS",
        ),
    ] = None
    ep_num_redundant_experts: Annotated[
        int, Arg("Experts that are held more than once.", at_least(0), planned=_BALANCE, metavar="EXPERTS")
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        Arg("How one of an expert's copies is chosen.", not_empty(), planned=_BALANCE, metavar="NAME"),
    ] = None
    init_expert_location: Annotated[
        str,
        Arg(
            "Where experts are at the start: trivial, or a file.", not_empty(), planned=_BALANCE, metavar="NAME_OR_PATH"
        ),
    ] = "trivial"
    enable_eplb: Annotated[bool, Arg("Move experts between ranks as their load changes.", planned=_BALANCE)] = False
    eplb_algorithm: Annotated[
        str, Arg("How new places of experts are found.", not_empty(), planned=_BALANCE, metavar="NAME")
    ] = "auto"
    eplb_rebalance_num_iterations: Annotated[
        int, Arg("Steps between two moves.", at_least(1), planned=_BALANCE, unit="steps")
    ] = 1000
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None,
        Arg("Layers that are moved in one step; all if not set.", at_least(1), planned=_BALANCE, unit="layers"),
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        Arg("Mean load of the ranks above which nothing is moved.", between(0, 1), planned=_BALANCE, metavar="SHARE"),
    ] = 1.0
    expert_distribution_recorder_mode: Annotated[
        str | None,
        Arg(
            "How the use of experts is recorded; not at all if not set.", not_empty(), planned=_BALANCE, metavar="MODE"
        ),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        Arg(
            "Steps of which the use of experts is kept.",
            at_least_or(1, -1, "all"),
            planned=_BALANCE,
            unit="steps",
        ),
    ] = None
    enable_expert_distribution_metrics: Annotated[
        bool, Arg("Report how evenly experts are used.", planned=_BALANCE)
    ] = False
    elastic_ep_backend: Annotated[
        str | None,
        Arg("Backend that lets ranks of experts come and go.", not_empty(), planned=_EP, metavar="NAME"),
    ] = None
    mooncake_ib_device: Annotated[
        str | None,
        Arg(
            "InfiniBand devices over which Mooncake carries experts' tokens.", not_empty(), planned=_EP, metavar="NAMES"
        ),
    ] = None
