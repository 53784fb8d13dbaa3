"""Arguments for several devices, replicas or machines."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, not_empty
from srv.args.spec import Arg

_TP = "tensor parallelism is not implemented yet"
_PP = "pipeline parallelism is not implemented yet"
_DP = "data parallelism is not implemented yet"
_NODES = "serving with several machines is not implemented yet"
_DP_ATTENTION = "data-parallel attention is not implemented yet"


class ParallelArgs(NamedTuple):
    """How a model is spread over devices, and how they talk to one another."""

    tp_size: Annotated[
        int,
        Arg(
            "Devices that share each layer (tensor parallelism).",
            at_least(1),
            planned=_TP,
            metavar="RANKS",
            aliases=("tensor_parallel_size", "tp"),
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Arg(
            "Replicas of the model (data parallelism).",
            at_least(1),
            planned=_DP,
            metavar="REPLICAS",
            aliases=("data_parallel_size", "dp"),
        ),
    ] = 1
    pp_size: Annotated[
        int,
        Arg(
            "Devices that share the layers among them (pipeline parallelism).",
            at_least(1),
            planned=_PP,
            metavar="STAGES",
            aliases=("pipeline_parallel_size", "pp"),
        ),
    ] = 1
    pp_max_micro_batch_size: Annotated[
        int | None,
        Arg("Most requests in one micro-batch of a pipeline.", at_least(1), planned=_PP, unit="requests"),
    ] = None
    load_balance_method: Annotated[
        Literal["round_robin", "shortest_queue", "minimum_tokens"],
        Arg("How requests are divided among replicas.", planned=_DP),
    ] = "round_robin"
    load_watch_interval: Annotated[
        float, Arg("Time between two looks at the load of the replicas.", above(0), planned=_DP, unit="seconds")
    ] = 0.1
    prefill_round_robin_balance: Annotated[
        bool,
        Arg(
            "Promise that the prefill server divides requests in turn, so that a decode server knows their replica.",
            planned=_DP,
        ),
    ] = False
    enable_dp_attention: Annotated[
        bool, Arg("Divide requests for attention, and weights for all else.", planned=_DP_ATTENTION)
    ] = False
    enable_dp_lm_head: Annotated[
        bool, Arg("Divide the vocabulary within a replica's group only.", planned=_DP_ATTENTION)
    ] = False
    enable_attn_tp_input_scattered: Annotated[
        bool,
        Arg("Keep the input of attention divided among tensor-parallel ranks.", planned=_TP),
    ] = False
    nnodes: Annotated[int, Arg("Machines that serve together.", at_least(1), planned=_NODES, metavar="MACHINES")] = 1
    node_rank: Annotated[int, Arg("This machine's number among them.", at_least(0), planned=_NODES, metavar="RANK")] = 0
    dist_init_addr: Annotated[
        str | None,
        Arg("Where the ranks meet to find one another.", not_empty(), planned=_NODES, metavar="HOST:PORT"),
    ] = None
    communicator_port: Annotated[
        int | None,
        Arg(
            "Port on which the ranks' communicator is set up; any free one if not set.", between(1, 65535), planned=_TP
        ),
    ] = None
    dist_timeout: Annotated[
        int | None, Arg("Time that ranks wait for one another.", at_least(1), planned=_TP, unit="seconds")
    ] = None
    disable_custom_all_reduce: Annotated[bool, Arg("Sum across ranks with the vendor's library only.", planned=_TP)] = (
        False
    )
    enable_allreduce_fusion: Annotated[bool, Arg("Sum across ranks and normalise in one kernel.", planned=_TP)] = False
    enable_mscclpp: Annotated[bool, Arg("Sum short messages across ranks with MSCCL++.", planned=_TP)] = False
    enable_in_switch_reduction: Annotated[
        bool, Arg("Let the switch between devices add, for long prompts.", planned=_TP)
    ] = False
    enable_symm_mem: Annotated[
        bool, Arg("Use the communicator's symmetric memory for fast collectives.", planned=_TP)
    ] = False
    enable_torch_symm_mem: Annotated[bool, Arg("Use torch's symmetric memory to sum across ranks.", planned=_TP)] = (
        False
    )
    enable_p2p_check: Annotated[
        bool, Arg("Check that devices can reach one another's memory instead of assuming it.", planned=_TP)
    ] = False
