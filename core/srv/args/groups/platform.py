"""Arguments that select a platform, its backends and its dtypes."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, each, not_empty
from srv.args.spec import Arg

_GRAMMAR = "constrained decoding (by a grammar or JSON schema) is not implemented yet"
_PLACING = "only one device is used so far; placing ranks on other devices is not implemented yet"
_NO_FP8_KV = "FP8 KV pools are not implemented yet"
_SPARSE = "models with sparse attention (NSA) are not implemented yet"


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
    base_device_id: Annotated[
        int, Arg("Index of the first device that ranks use.", at_least(0), planned=_PLACING, metavar="INDEX")
    ] = 0
    device_id_step: Annotated[
        int,
        Arg(
            "Difference between the device indices of consecutive ranks.", at_least(1), planned=_PLACING, metavar="STEP"
        ),
    ] = 1
    numa_node: Annotated[
        tuple[int, ...] | None,
        Arg(
            "NUMA node for the process of each rank.",
            each(at_least(0)),
            planned="binding processes to NUMA nodes is not implemented yet",
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
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        Arg(
            "Dtype of keys and values in the KV pool; auto uses that of the activations, int8 stores 8-bit integers "
            "with one scale per token and head.",
            planned_values=(("fp8_e5m2", _NO_FP8_KV), ("fp8_e4m3", _NO_FP8_KV)),
        ),
    ] = "auto"
    grammar_backend: Annotated[
        str | None,
        Arg(
            "Grammar backend for constrained decoding.",
            not_empty(),
            family="grammar",
            planned=_GRAMMAR,
            metavar="NAME",
        ),
    ] = None
    constrained_json_whitespace_pattern: Annotated[
        str | None,
        Arg("Regular expression for the white space in constrained JSON output.", planned=_GRAMMAR, metavar="PATTERN"),
    ] = None
    constrained_json_disable_any_whitespace: Annotated[
        bool, Arg("Allow no white space in constrained JSON output.", planned=_GRAMMAR)
    ] = False
    disable_outlines_disk_cache: Annotated[
        bool, Arg("Do not cache compiled grammars of the outlines backend on disk.", planned=_GRAMMAR)
    ] = False
    nsa_prefill_backend: Annotated[
        str, Arg("Sparse attention backend for prefill.", not_empty(), planned=_SPARSE, metavar="NAME")
    ] = "flashmla_sparse"
    nsa_decode_backend: Annotated[
        str, Arg("Sparse attention backend for decode.", not_empty(), planned=_SPARSE, metavar="NAME")
    ] = "flashmla_kv"
    enable_nsa_prefill_context_parallel: Annotated[
        bool, Arg("Distribute a prompt over ranks in sparse attention (context parallelism).", planned=_SPARSE)
    ] = False
    fp8_gemm_backend: Annotated[
        str,
        Arg(
            "Backend for block-wise FP8 matrix multiplication.",
            not_empty(),
            planned="FP8 weights are not implemented yet",
            metavar="NAME",
        ),
    ] = "auto"
