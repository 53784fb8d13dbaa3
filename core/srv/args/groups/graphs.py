"""Arguments of graph capture, compilation and individual kernels."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import at_least, each, json_list, not_empty
from srv.args.spec import Arg

_CAPTURE = "options of graph capture are not implemented yet"
_COMPILE = "compiling the model is not implemented yet"
_PIECES = "piecewise graphs are not implemented yet"
_KERNEL = "the kernel that it would tune is not in srv yet"
_SPARSITY = "double sparsity is not implemented yet"


class GraphsArgs(NamedTuple):
    """What is captured, what is compiled, and how kernels are tuned."""

    disable_graphs: Annotated[
        bool, Arg("Launch the kernels of every step one by one, even if the platform can replay captured steps.")
    ] = False
    graph_max_batch_size: Annotated[
        int | None,
        Arg(
            "Largest batch size for which a graph is captured; chosen by device memory if not set.",
            at_least(1),
            needs="graphs",
            unit="requests",
        ),
    ] = None
    graph_batch_sizes: Annotated[
        tuple[int, ...] | None,
        Arg(
            "Batch sizes for which graphs are captured; if not set: 1, 2, 4, 8, then in growing steps.",
            each(at_least(1)),
            needs="graphs",
            unit="requests",
        ),
    ] = None
    disable_graph_padding: Annotated[
        bool, Arg("Replay a graph only for batches of exactly its size.", needs="graphs")
    ] = False
    enable_graph_profiling: Annotated[bool, Arg("Profile the capture of graphs.", planned=_CAPTURE, needs="graphs")] = (
        False
    )
    enable_graph_gc: Annotated[
        bool, Arg("Allow garbage collection during capture, which makes it slower.", planned=_CAPTURE, needs="graphs")
    ] = False
    enable_piecewise_graphs: Annotated[
        bool, Arg("Capture the model as piecewise graphs, for prefill too.", planned=_PIECES, needs="graphs")
    ] = False
    piecewise_graph_tokens: Annotated[
        str | None,
        Arg(
            "JSON list of the token counts for which piecewise graphs are captured.",
            json_list(),
            planned=_PIECES,
            needs="graphs",
            metavar="JSON",
        ),
    ] = None
    piecewise_graph_max_tokens: Annotated[
        int,
        Arg(
            "Largest token count for which piecewise graphs are captured.",
            at_least(1),
            planned=_PIECES,
            needs="graphs",
            unit="tokens",
        ),
    ] = 4096
    enable_torch_compile: Annotated[bool, Arg("Compile the model with torch.compile.", planned=_COMPILE)] = False
    torch_compile_max_bs: Annotated[
        int, Arg("Largest batch for which the model is compiled.", at_least(1), planned=_COMPILE, unit="requests")
    ] = 32
    enable_torch_compile_debug_mode: Annotated[
        bool, Arg("Enable the debug mode of torch.compile.", planned=_COMPILE)
    ] = False
    disable_kernel_autotune: Annotated[bool, Arg("Do not autotune kernels at start-up.", planned=_KERNEL)] = False
    triton_attention_reduce_in_fp32: Annotated[
        bool, Arg("Reduce the partial results of Triton attention in float32.", planned=_KERNEL)
    ] = False
    triton_attention_num_kv_splits: Annotated[
        int,
        Arg("Number of splits of a long context in Triton attention.", at_least(1), planned=_KERNEL, metavar="SPLITS"),
    ] = 8
    triton_attention_split_tile_size: Annotated[
        int | None,
        Arg(
            "Fixed size of the splits of a long context in Triton attention, instead of their number.",
            at_least(1),
            planned=_KERNEL,
            unit="tokens",
        ),
    ] = None
    disable_mla_ragged_prefill: Annotated[
        bool, Arg("Read keys and values of MLA prefill from pages, not from the tensors of the step.", planned=_KERNEL)
    ] = False
    disable_chunked_prefix_cache: Annotated[
        bool, Arg("Do not read a long cached prefix in chunks (MLA).", planned=_KERNEL)
    ] = False
    enable_double_sparsity: Annotated[
        bool, Arg("Let attention read only the most relevant tokens (double sparsity).", planned=_SPARSITY)
    ] = False
    ds_channel_config_path: Annotated[
        Path | None, Arg("File that lists the channels by which relevant tokens are selected.", planned=_SPARSITY)
    ] = None
    ds_heavy_channel_num: Annotated[
        int,
        Arg(
            "Number of channels by which relevant tokens are selected (double sparsity).",
            at_least(1),
            planned=_SPARSITY,
            metavar="CHANNELS",
        ),
    ] = 32
    ds_heavy_token_num: Annotated[
        int,
        Arg(
            "Number of tokens that attention reads with double sparsity.", at_least(1), planned=_SPARSITY, unit="tokens"
        ),
    ] = 256
    ds_heavy_channel_type: Annotated[
        str,
        Arg(
            "Whether double sparsity uses channels of queries, of keys or of both.",
            not_empty(),
            planned=_SPARSITY,
            metavar="TYPE",
        ),
    ] = "qk"
    ds_sparse_decode_threshold: Annotated[
        int,
        Arg(
            "Shortest context for which double sparsity selects tokens.", at_least(1), planned=_SPARSITY, unit="tokens"
        ),
    ] = 4096
