"""Arguments of graph capture, compilation and individual kernels."""

from pathlib import Path
from typing import Annotated, NamedTuple

from srv.args.checks import at_least, between, each, json_counts
from srv.args.spec import Arg

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
    enable_graph_profiling: Annotated[
        bool,
        Arg(
            "Profile the capture of graphs: the log has a table of operators and the path of the trace, which is "
            "written to the folder for temporary files.",
            needs="graphs",
        ),
    ] = False
    enable_graph_gc: Annotated[
        bool,
        Arg("Allow Python's garbage collection during capture, which makes it slower.", needs="graphs"),
    ] = False
    enable_piecewise_graphs: Annotated[
        bool,
        Arg(
            "Capture the layers as graphs that are cut at attention (piecewise graphs), and replay these for steps "
            "with prompts and for all others that no other graph serves.",
            needs="piecewise_graphs",
        ),
    ] = False
    piecewise_graph_tokens: Annotated[
        str | None,
        Arg(
            "JSON list of the token counts for which piecewise graphs are captured; a step is padded to the next one. "
            "If not set: 8, then in growing steps, up to the largest step.",
            json_counts(),
            only_with=("enable_piecewise_graphs",),
            needs="piecewise_graphs",
            metavar="JSON",
        ),
    ] = None
    piecewise_graph_max_tokens: Annotated[
        int,
        Arg(
            "Largest token count for which piecewise graphs are captured; larger steps run eagerly.",
            at_least(1),
            only_with=("enable_piecewise_graphs",),
            unit="tokens",
        ),
    ] = 4096
    enable_torch_compile: Annotated[
        bool,
        Arg(
            "Compile the decode steps of small batches with torch.compile while the engine starts; they are then not "
            "captured as graphs.",
            needs="torch_compile",
        ),
    ] = False
    torch_compile_max_bs: Annotated[
        int,
        Arg(
            "Largest decode step that is compiled, in requests (with drafts: in tokens).",
            at_least(1),
            only_with=("enable_torch_compile",),
            unit="requests",
        ),
    ] = 32
    enable_torch_compile_debug_mode: Annotated[
        bool,
        Arg(
            "Write what torch.compile gets to a folder for temporary files, which the log names: each graph, the "
            "conditions that steps check, and how far the logits of compiled steps are from uncompiled ones.",
            only_with=("enable_torch_compile",),
        ),
    ] = False
    disable_kernel_autotune: Annotated[bool, Arg("Do not autotune kernels at start-up.", planned=_KERNEL)] = False
    triton_attention_reduce_in_fp32: Annotated[
        bool,
        Arg(
            "Reduce the partial results of Triton attention in float32.",
            planned="they are always stored and reduced in float32; a cheaper reduction is not implemented yet",
        ),
    ] = False
    triton_attention_num_kv_splits: Annotated[
        int | None,
        Arg(
            "Largest number of splits of a long context in Triton attention; by the device if not set.",
            between(1, 1024),
            read_by="attention",
            metavar="SPLITS",
        ),
    ] = None
    triton_attention_split_tile_size: Annotated[
        int | None,
        Arg(
            "Fixed size of the splits of a long context in Triton attention, rounded up to whole blocks of keys; by "
            "default they depend on the other requests of the step.",
            at_least(64),
            read_by="attention",
            unit="tokens",
        ),
    ] = None
    disable_mla_ragged_prefill: Annotated[
        bool,
        Arg(
            "Let prompts attend to the compressed vectors of latent attention (MLA), as decode steps do, and do not "
            "compute the keys and values of each head. The backends native, torch_native and triton read it.",
            read_by="attention",
        ),
    ] = False
    disable_chunked_prefix_cache: Annotated[
        bool,
        Arg(
            "Compute the keys and values of a whole prefix at once where prompts need those of each head (MLA), not in "
            "chunks, which take less memory. The backends native, torch_native and triton read it.",
            read_by="attention",
        ),
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
            planned=_SPARSITY,
            metavar="CHANNELS",
        ),
    ] = 32
    ds_heavy_token_num: Annotated[
        int,
        Arg("Number of tokens that attention reads with double sparsity.", planned=_SPARSITY, unit="tokens"),
    ] = 256
    ds_heavy_channel_type: Annotated[
        str,
        Arg(
            "Whether double sparsity uses channels of queries, of keys or of both.",
            planned=_SPARSITY,
            metavar="TYPE",
        ),
    ] = "qk"
    ds_sparse_decode_threshold: Annotated[
        int,
        Arg("Shortest context for which double sparsity selects tokens.", planned=_SPARSITY, unit="tokens"),
    ] = 4096
