"""Arguments that select a platform, its backends and its dtypes."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, each, is_pattern, not_empty
from srv.args.spec import Arg
from srv.grammar.registry import BUILT_IN, GRAMMAR_OFF, further_names

_WHOLE_PROMPTS = "every rank computes the indexer of sparse attention, and its heads, for all tokens of a prompt"


class PlatformArgs(NamedTuple):
    """Where the model runs, and with which backends."""

    device: Annotated[
        str | None,
        Arg(
            "Platform to run on, one of those that `srv platforms` lists; the best available one if not set.",
            check=not_empty(),
            metavar="NAME[:PROFILE]",
        ),
    ] = None
    base_device_id: Annotated[int, Arg("Index of the device of the first rank.", at_least(0), metavar="INDEX")] = 0
    device_id_step: Annotated[
        int,
        Arg(
            "Difference between the device indices of consecutive ranks.",
            at_least(1),
            only_with=("tp_size",),
            metavar="STEP",
        ),
    ] = 1
    numa_node: Annotated[
        tuple[int, ...] | None,
        Arg(
            "NUMA node of each rank: its process runs on the node's processors and prefers the node's memory.",
            each(at_least(0)),
            metavar="NODE",
        ),
    ] = None
    attention_backend: Annotated[
        str | None, Arg("Attention backend for prefill and decode.", family="attention", metavar="NAME")
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for prefill; it overrides --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for decode; it overrides --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    sampling_backend: Annotated[str | None, Arg("Backend that samples tokens.", family="sampling", metavar="NAME")] = (
        None
    )
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"],
        Arg(
            "Dtype of keys and values in the KV pool; auto uses that of the activations, int8 stores 8-bit integers "
            "with one scale per token and head, fp8_e4m3 and fp8_e5m2 8-bit floats with one scale per layer for keys "
            "and one for values: of --quantization-param-path, of the checkpoint, calculated at start with "
            "--calculate-kv-scales, or 1.",
        ),
    ] = "auto"
    grammar_backend: Annotated[
        str | None,
        Arg(
            "Backend that constrains outputs to a JSON schema, a regular expression or a grammar; none refuses such "
            "requests.",
            choices=(*BUILT_IN, GRAMMAR_OFF),
            further_choices=further_names,
        ),
    ] = None
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        Arg(
            "Regular expression for the white space between the tokens of constrained JSON output; by default at most "
            "one blank. ' |\\n {0,32}' allows indented lines.",
            is_pattern(),
            metavar="PATTERN",
        ),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, Arg("Allow no white space between the tokens of constrained JSON output.")
    ] = False
    disable_outlines_disk_cache: Annotated[
        bool,
        Arg(
            "Do not cache compiled grammars of the outlines backend on disk.",
            planned="compiled grammars are cached in memory only; nothing is written to disk",
        ),
    ] = False
    nsa_prefill_backend: Annotated[
        str | None,
        Arg(
            "Attention backend for prefill of models with sparse attention, in which an indexer chooses the keys "
            "(DeepSeek-V3.2); it overrides --prefill-attention-backend.",
            family="attention",
            metavar="NAME",
        ),
    ] = None
    nsa_decode_backend: Annotated[
        str | None,
        Arg(
            "Attention backend for decode of models with sparse attention; it overrides --decode-attention-backend.",
            family="attention",
            metavar="NAME",
        ),
    ] = None
    enable_nsa_prefill_context_parallel: Annotated[
        bool, Arg("Distribute a prompt over ranks in sparse attention (context parallelism).", planned=_WHOLE_PROMPTS)
    ] = False
    nsa_prefill_cp_mode: Annotated[
        Literal["in-seq-split", "round-robin-split"],
        Arg(
            "How context parallelism in sparse attention distributes a prompt: in two blocks for each rank, one from "
            "either end, or token by token in turn.",
            planned=_WHOLE_PROMPTS,
        ),
    ] = "in-seq-split"
    activation_precision: Annotated[
        Literal["int8", "full"],
        Arg(
            "Activations in products with weights that a checkpoint quantizes without them, such as 4-bit ones: int8 "
            "lets kernels round them to 8 bits, with scales for groups of inputs, which is faster on CPUs; full keeps "
            "them."
        ),
    ] = "int8"
    fp8_gemm_backend: Annotated[
        str,
        Arg(
            "Implementation of products with FP8 weights, one of those that the platform has; torch_native calls "
            "PyTorch's operators.",
            not_empty(),
            metavar="NAME",
        ),
    ] = "auto"
