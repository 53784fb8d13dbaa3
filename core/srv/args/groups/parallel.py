"""Arguments for several devices, replicas or machines."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, not_empty
from srv.args.spec import Arg

_TP = "the platforms' communicators have no such setting yet"
_PP = "pipeline parallelism is not implemented yet"
_ROOMS = "requests have no bootstrap room: prefill and decode on separate servers are not implemented yet"
_WATCHED = "nothing polls replicas: their load is counted with every request and every output"
_NODES = "serving on several machines is not implemented yet"


class ParallelArgs(NamedTuple):
    """How a model is distributed over devices, and how they communicate."""

    tp_size: Annotated[
        int,
        Arg(
            "Ranks over which each layer is sharded (tensor parallelism).",
            at_least(1),
            needs="communicator",
            metavar="RANKS",
            aliases=("tensor_parallel_size", "tp"),
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Arg(
            "Replicas of the model, each with tp_size ranks, a KV pool and requests of its own (data parallelism); "
            "with enable_dp_attention, replicas of attention among tp_size ranks.",
            at_least(1),
            metavar="REPLICAS",
            aliases=("data_parallel_size", "dp"),
        ),
    ] = 1
    pp_size: Annotated[
        int,
        Arg(
            "Stages into which the layers are divided (pipeline parallelism).",
            at_least(1),
            planned=_PP,
            metavar="STAGES",
            aliases=("pipeline_parallel_size", "pp"),
        ),
    ] = 1
    pp_max_micro_batch_size: Annotated[
        int | None,
        Arg("Maximum number of requests in one micro-batch of a pipeline.", at_least(1), planned=_PP, unit="requests"),
    ] = None
    load_balance_method: Annotated[
        Literal[
            "auto",
            "round_robin",
            "shortest_queue",
            "minimum_tokens",
            "decode_round_robin",
            "total_requests",
            "total_tokens",
        ],
        Arg(
            "How requests are distributed over replicas: to the one that has cached the longest prefix unless others "
            "have far less to do (auto), to each in turn (round_robin, decode_round_robin), or to the one with the "
            "fewest running and waiting requests (total_requests, shortest_queue) or tokens (total_tokens, "
            "minimum_tokens).",
            planned_values=(("follow_bootstrap_room", _ROOMS),),
            only_with=("dp_size",),
        ),
    ] = "auto"
    load_watch_interval: Annotated[
        float,
        Arg("Time between two checks of the load of the replicas.", above(0), planned=_WATCHED, unit="seconds"),
    ] = 0.1
    prefill_round_robin_balance: Annotated[
        bool,
        Arg(
            "Assume that the prefill server distributes requests round-robin, so a decode server knows their replica.",
            planned=_ROOMS,
        ),
    ] = False
    enable_dp_attention: Annotated[
        bool,
        Arg(
            "Divide attention among the ranks of one replica (tp_size / dp_size of them), and everything else among "
            "all tp_size ranks. Limits of requests and of chunks count all replicas.",
            needs="communicator",
        ),
    ] = False
    enable_dp_lm_head: Annotated[
        bool, Arg("Shard the LM head only within the group of a replica.", only_with=("enable_dp_attention",))
    ] = False
    attn_cp_size: Annotated[
        int,
        Arg(
            "Ranks over which a prompt is distributed in attention (context parallelism).",
            at_least(1),
            planned="attention is computed for whole prompts",
            metavar="RANKS",
            aliases=("attention_context_parallel_size",),
        ),
    ] = 1
    enable_attn_tp_input_scattered: Annotated[
        bool,
        Arg("Keep the input of attention scattered over tensor-parallel ranks.", planned=_TP),
    ] = False
    nnodes: Annotated[
        int, Arg("Number of machines that serve together.", at_least(1), planned=_NODES, metavar="MACHINES")
    ] = 1
    node_rank: Annotated[
        int,
        Arg("Rank of this machine among all that serve together, from 0.", at_least(0), planned=_NODES, metavar="RANK"),
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        Arg(
            "Address at which the ranks initialize their process group.",
            not_empty(),
            planned=_NODES,
            metavar="HOST:PORT",
        ),
    ] = None
    communicator_port: Annotated[
        int | None,
        Arg(
            "Port on which the communicator of the ranks is initialized; any free one if not set.",
            between(1, 65535),
            planned=_TP,
        ),
    ] = None
    dist_timeout: Annotated[
        int | None,
        Arg(
            "How long a rank waits for the others before the engine ends; 4 seconds if not set.",
            at_least(1),
            needs="communicator",
            only_with=("tp_size",),
            unit="seconds",
        ),
    ] = None
    disable_custom_all_reduce: Annotated[bool, Arg("Use only the vendor's library for all-reduce.", planned=_TP)] = (
        False
    )
    enable_allreduce_fusion: Annotated[bool, Arg("Fuse all-reduce and normalization into one kernel.", planned=_TP)] = (
        False
    )
    enable_mscclpp: Annotated[bool, Arg("Use MSCCL++ for all-reduce of small messages.", planned=_TP)] = False
    enable_in_switch_reduction: Annotated[
        bool, Arg("Let the switch between devices compute reductions, for long prompts.", planned=_TP)
    ] = False
    enable_symm_mem: Annotated[
        bool, Arg("Use the communicator's symmetric memory for fast collectives.", planned=_TP)
    ] = False
    enable_torch_symm_mem: Annotated[bool, Arg("Use torch's symmetric memory for all-reduce.", planned=_TP)] = False
    enable_p2p_check: Annotated[
        bool, Arg("Check for peer-to-peer access between devices instead of assuming it.", planned=_TP)
    ] = False
