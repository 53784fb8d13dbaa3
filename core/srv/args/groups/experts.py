"""Arguments of mixture-of-experts models: expert placement and token dispatch."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, at_least_or, between, not_empty, one_of
from srv.args.spec import Arg

_SHARED = "shared experts are always computed separately; fusing them is not implemented yet"
_EP = "expert parallelism is not implemented yet"
_BALANCE = "expert load balancing is not implemented yet"
_PLACEMENT = "ranks get experts in the order of their numbers (ep_size); other placements are not implemented yet"
_DISPATCHED = "it counts the tokens that DeepEP dispatches, and expert parallelism is not implemented yet"
_PER_TOKEN = "records of single tokens are not implemented yet; per_pass has those of single steps"


class ExpertsArgs(NamedTuple):
    """Where experts are placed, which backends compute them, and how their load is balanced."""

    ep_size: Annotated[
        int,
        Arg(
            "Parts into which the experts of a layer are distributed over the ranks (expert parallelism): each rank "
            "has whole experts, or slices of some where there are more ranks than parts.",
            at_least(1),
            needs="communicator",
            metavar="PARTS",
            aliases=("expert_parallel_size", "ep"),
        ),
    ] = 1
    moe_a2a_backend: Annotated[
        str,
        Arg(
            "All-to-all backend that dispatches tokens to the ranks of their experts.",
            not_empty(),
            planned=_EP,
            metavar="NAME",
        ),
    ] = "none"
    moe_runner_backend: Annotated[
        str,
        Arg(
            "Backend that computes the experts of models with native layers.", not_empty(), family="moe", metavar="NAME"
        ),
    ] = "auto"
    mxfp4_moe_precision: Annotated[
        Literal["default", "bf16"],
        Arg(
            "Dtype of the activations for MXFP4 experts: bf16 keeps them as they are, and default lets backends round "
            "them.",
            read_by="moe",
        ),
    ] = "default"
    disable_moe_fp4_allgather: Annotated[
        bool, Arg("All-gather the tokens of FP4 experts before they are quantized, not after.", planned=_EP)
    ] = False
    disable_shared_experts_fusion: Annotated[
        bool, Arg("Compute shared experts separately from the routed experts.", planned=_SHARED)
    ] = False
    deepep_mode: Annotated[
        Literal["normal", "low_latency", "auto"],
        Arg("DeepEP mode; auto uses low_latency for decode batches and normal for prefill.", planned=_EP),
    ] = "auto"
    deepep_config: Annotated[
        str | None,
        Arg(
            "Tuned DeepEP settings, as JSON or as a path to a JSON file.",
            not_empty(),
            planned=_EP,
            metavar="JSON_OR_PATH",
        ),
    ] = None
    moe_dense_tp_size: Annotated[
        int | None,
        Arg(
            "Ranks over which the dense layers of a MoE model are sharded; all ranks if not set.",
            one_of(1),
            planned="the dense layers of a mixture-of-experts model are always sharded over all ranks",
            metavar="RANKS",
        ),
    ] = None
    ep_num_redundant_experts: Annotated[
        int,
        Arg(
            "Number of redundant experts, i.e. additional copies of experts.",
            at_least(0),
            planned=_BALANCE,
            metavar="EXPERTS",
        ),
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        Arg(
            "Algorithm that selects one of an expert's copies for a token.",
            not_empty(),
            planned=_BALANCE,
            metavar="NAME",
        ),
    ] = None
    init_expert_location: Annotated[
        str,
        Arg(
            "Initial placement of the experts: trivial, or JSON or a JSON file with physical_to_logical_map or "
            "logical_count, as /dump_expert_distribution_record gives it.",
            not_empty(),
            planned=_PLACEMENT,
            metavar="NAME_OR_JSON",
        ),
    ] = "trivial"
    enable_eplb: Annotated[bool, Arg("Rebalance experts between ranks as their load changes.", planned=_BALANCE)] = (
        False
    )
    eplb_algorithm: Annotated[
        str, Arg("Algorithm that computes a new expert placement.", not_empty(), planned=_BALANCE, metavar="NAME")
    ] = "auto"
    eplb_rebalance_num_iterations: Annotated[
        int, Arg("Steps between two rebalancings.", at_least(1), planned=_BALANCE, unit="steps")
    ] = 1000
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None,
        Arg("Layers that are rebalanced in one step; all if not set.", at_least(1), planned=_BALANCE, unit="layers"),
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        Arg(
            "Mean utilization of the ranks above which experts are not rebalanced.",
            between(0, 1),
            planned=_BALANCE,
            metavar="SHARE",
        ),
    ] = 1.0
    expert_distribution_recorder_mode: Annotated[
        Literal["stat", "per_pass"] | None,
        Arg(
            "How the usage of experts is recorded between /start_expert_distribution_record and "
            "/dump_expert_distribution_record: added up over steps (stat), or for each (per_pass). Steps run eagerly "
            "meanwhile.",
            planned_values=(("stat_approx", _DISPATCHED), ("per_token", _PER_TOKEN)),
        ),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        Arg(
            "Number of steps whose expert usage is kept.",
            at_least_or(1, -1, "all"),
            unit="steps",
            only_with=("expert_distribution_recorder_mode",),
        ),
    ] = None
    enable_expert_distribution_metrics: Annotated[
        bool,
        Arg(
            "Report how evenly experts are used: at each scrape of /metrics, the tokens of each layer's busiest expert"
            " beside the mean of all. Steps run eagerly."
        ),
    ] = False
    elastic_ep_backend: Annotated[
        str | None,
        Arg(
            "Backend for elastic expert parallelism, in which ranks can join and leave.",
            not_empty(),
            planned=_EP,
            metavar="NAME",
        ),
    ] = None
    mooncake_ib_device: Annotated[
        str | None,
        Arg(
            "InfiniBand devices over which Mooncake dispatches tokens to experts.",
            not_empty(),
            planned=_EP,
            metavar="NAMES",
        ),
    ] = None
