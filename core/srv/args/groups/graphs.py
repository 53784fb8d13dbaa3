"""Arguments of captured graphs, compilation, and what single kernels do."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import at_least, each, json_list, not_empty
from srv.args.spec import Arg

_CAPTURE = "how graphs are captured cannot be chosen yet"
_COMPILE = "compiling the model is not implemented yet"
_PIECES = "graphs of parts of the model are not implemented yet"
_KERNEL = "the kernel that it would tune is not in srv yet"
_SPARSITY = "double sparsity is not implemented yet"


class GraphsArgs(NamedTuple):
    """What is captured, what is compiled, and how kernels are tuned."""

    disable_graphs: Annotated[
        bool, Arg("Launch every step kernel by kernel, although the platform can replay captured ones.")
    ] = False
    graph_max_batch_size: Annotated[
        int | None,
        Arg(
            "Largest batch of which a graph is captured; chosen by the device's memory if not set.",
            at_least(1),
            needs="graphs",
            unit="requests",
        ),
    ] = None
    graph_batch_sizes: Annotated[
        tuple[int, ...] | None,
        Arg(
            "Batch sizes of which graphs are captured; 1, 2, 4, 8 and growing steps if not set.",
            each(at_least(1)),
            needs="graphs",
            unit="requests",
        ),
    ] = None
    disable_graph_padding: Annotated[bool, Arg("Use a graph only for batches of exactly its size.", needs="graphs")] = (
        False
    )
    enable_graph_profiling: Annotated[bool, Arg("Profile the capture of graphs.", planned=_CAPTURE, needs="graphs")] = (
        False
    )
    enable_graph_gc: Annotated[
        bool, Arg("Let garbage be collected during capture, which is then slower.", planned=_CAPTURE, needs="graphs")
    ] = False
    enable_piecewise_graphs: Annotated[
        bool, Arg("Capture parts of the model, for prompts too.", planned=_PIECES, needs="graphs")
    ] = False
    piecewise_graph_tokens: Annotated[
        str | None,
        Arg(
            "JSON list of the token counts of which parts are captured.",
            json_list(),
            planned=_PIECES,
            needs="graphs",
            metavar="JSON",
        ),
    ] = None
    piecewise_graph_max_tokens: Annotated[
        int,
        Arg("Most tokens of which parts are captured.", at_least(1), planned=_PIECES, needs="graphs", unit="tokens"),
    ] = 4096
    enable_torch_compile: Annotated[bool, Arg("Compile the model with torch.compile.", planned=_COMPILE)] = False
    torch_compile_max_bs: Annotated[
        int, Arg("Largest batch for which the model is compiled.", at_least(1), planned=_COMPILE, unit="requests")
    ] = 32
    enable_torch_compile_debug_mode: Annotated[bool, Arg("Tell what torch.compile does.", planned=_COMPILE)] = False
    disable_kernel_autotune: Annotated[
        bool, Arg("Do not try out variants of kernels at the start.", planned=_KERNEL)
    ] = False
    triton_attention_reduce_in_fp32: Annotated[
        bool, Arg("Keep the partial results of Triton attention in 32 bits.", planned=_KERNEL)
    ] = False
    triton_attention_num_kv_splits: Annotated[
        int,
        Arg("Pieces into which Triton attention cuts a long context.", at_least(1), planned=_KERNEL, metavar="PIECES"),
    ] = 8
    triton_attention_split_tile_size: Annotated[
        int | None,
        Arg(
            "Size of those pieces, in place of their number; the same for every batch.",
            at_least(1),
            planned=_KERNEL,
            unit="tokens",
        ),
    ] = None
    disable_mla_ragged_prefill: Annotated[
        bool, Arg("Read latent attention's prompts from pages, not from the step's own tensors.", planned=_KERNEL)
    ] = False
    disable_chunked_prefix_cache: Annotated[
        bool, Arg("Do not read a long cached prefix in pieces (latent attention).", planned=_KERNEL)
    ] = False
    enable_double_sparsity: Annotated[
        bool, Arg("Let attention read only the tokens that matter most.", planned=_SPARSITY)
    ] = False
    ds_channel_config_path: Annotated[
        Path | None, Arg("File that names the channels which tell the tokens that matter.", planned=_SPARSITY)
    ] = None
    ds_heavy_channel_num: Annotated[
        int, Arg("Number of those channels.", at_least(1), planned=_SPARSITY, metavar="CHANNELS")
    ] = 32
    ds_heavy_token_num: Annotated[
        int, Arg("Tokens that attention then reads.", at_least(1), planned=_SPARSITY, unit="tokens")
    ] = 256
    ds_heavy_channel_type: Annotated[
        str, Arg("Whether the channels are of queries, keys or both.", not_empty(), planned=_SPARSITY, metavar="TYPE")
    ] = "qk"
    ds_sparse_decode_threshold: Annotated[
        int, Arg("Shortest context for which tokens are left out.", at_least(1), planned=_SPARSITY, unit="tokens")
    ] = 4096
