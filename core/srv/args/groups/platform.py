"""Arguments that choose a platform, and its backends and types within it."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, each, not_empty
from srv.args.spec import Arg

_GRAMMAR = "output that follows a grammar or schema is not implemented yet"
_PLACING = "one device is used so far; placing ranks on others is not implemented yet"
_NO_EIGHT_BITS = "KV pools of 8-bit floating point are not implemented yet"
_SPARSE = "models with sparse attention (NSA) are not implemented yet"


class PlatformArgs(NamedTuple):
    """Where the model runs, and through which backends."""

    device: Annotated[
        str | None,
        Arg(
            "Platform to run on, as `srv platforms` lists them; the best available one if not set.",
            check=not_empty(),
            metavar="NAME[:PROFILE]",
        ),
    ] = None
    base_device_id: Annotated[
        int, Arg("Index of the first device that ranks take.", at_least(0), planned=_PLACING, metavar="INDEX")
    ] = 0
    device_id_step: Annotated[
        int, Arg("Distance from one rank's device to the next one's.", at_least(1), planned=_PLACING, metavar="STEP")
    ] = 1
    numa_node: Annotated[
        tuple[int, ...] | None,
        Arg(
            "Memory node of the host for each rank's process.",
            each(at_least(0)),
            planned="binding processes to memory nodes is not implemented yet",
            metavar="NODE",
        ),
    ] = None
    attention_backend: Annotated[
        str | None, Arg("Attention backend, for prompts and for output.", family="attention", metavar="NAME")
    ] = None
    prefill_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for prompts; goes before --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    decode_attention_backend: Annotated[
        str | None,
        Arg("Attention backend for output; goes before --attention-backend.", family="attention", metavar="NAME"),
    ] = None
    sampling_backend: Annotated[str | None, Arg("Backend that draws tokens.", family="sampling", metavar="NAME")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        Arg(
            "Type of keys and values in the KV pool; auto takes that of the activations, int8 keeps 8-bit integers and "
            "a scale for each token and head.",
            planned_values=(("fp8_e5m2", _NO_EIGHT_BITS), ("fp8_e4m3", _NO_EIGHT_BITS)),
        ),
    ] = "auto"
    grammar_backend: Annotated[
        str | None,
        Arg(
            "Backend that keeps output within a grammar.",
            not_empty(),
            family="grammar",
            planned=_GRAMMAR,
            metavar="NAME",
        ),
    ] = None
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        Arg("Regular expression of the white space that JSON output may hold.", planned=_GRAMMAR, metavar="PATTERN"),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, Arg("Let JSON output hold no white space between its parts.", planned=_GRAMMAR)
    ] = False
    disable_outlines_disk_cache: Annotated[
        bool, Arg("Keep no compiled grammars of the backend outlines on disk.", planned=_GRAMMAR)
    ] = False
    nsa_prefill_backend: Annotated[
        str, Arg("Backend of sparse attention for prompts.", not_empty(), planned=_SPARSE, metavar="NAME")
    ] = "flashmla_sparse"
    nsa_decode_backend: Annotated[
        str, Arg("Backend of sparse attention for output.", not_empty(), planned=_SPARSE, metavar="NAME")
    ] = "flashmla_kv"
    enable_nsa_prefill_context_parallel: Annotated[
        bool, Arg("Spread a prompt over the ranks of sparse attention.", planned=_SPARSE)
    ] = False
    fp8_gemm_backend: Annotated[
        str,
        Arg(
            "Backend that multiplies 8-bit floating-point matrices block by block.",
            not_empty(),
            planned="8-bit floating-point weights are not implemented yet",
            metavar="NAME",
        ),
    ] = "auto"
