"""Arguments that divide the memory of a device."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, fraction
from srv.args.spec import Arg

_RATIO = "a ratio between one pool and separate ones is not implemented; see swa_full_tokens_ratio"
_SECOND_COPY = "steps overlap with one copy already, which the device updates in order; there is no other strategy yet"


class MemoryArgs(NamedTuple):
    """How much memory weights and KV pool take, and how the pool is divided."""

    mem_fraction_static: Annotated[
        float,
        Arg(
            "Fraction of the device memory that other processes leave, for weights and KV pool together.",
            fraction(),
            metavar="FRACTION",
        ),
    ] = 0.88
    max_total_tokens: Annotated[
        int | None,
        Arg("Maximum number of tokens in the KV pool; if not set, only memory limits it.", at_least(2), unit="tokens"),
    ] = None
    page_size: Annotated[int, Arg("Tokens per page of the KV pool.", at_least(1), needs="paged_kv", unit="tokens")] = 1
    disable_radix_cache: Annotated[
        bool, Arg("Disable the prefix cache, which keeps the KV of finished requests for reuse.")
    ] = False
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu"],
        Arg(
            "Which cached prefix is evicted first: the least recently or the least frequently used one.",
            planned="prefixes are evicted in the order of their last use; no other order is implemented yet",
        ),
    ] = "lru"
    hybrid_kvcache_ratio: Annotated[
        float | None,
        Arg(
            "Ratio from one pool for all layers (0) to a separate sliding-window pool of minimal size (1).",
            planned=_RATIO,
            metavar="RATIO",
            const="0.5",
        ),
    ] = None
    swa_full_tokens_ratio: Annotated[
        float | None,
        Arg(
            "Tokens in the pool of sliding-window layers per token in the pool of full-attention layers. If it is not"
            " set, the windows of all running requests and of some cached prefixes fit.",
            between(0, 1),
            metavar="RATIO",
        ),
    ] = None
    disable_hybrid_swa_memory: Annotated[
        bool, Arg("Keep sliding-window layers in the same pool as all other layers.")
    ] = False
    max_mamba_cache_size: Annotated[
        int | None,
        Arg(
            "Recurrent states that are kept: one per running request, and the others for cached prefixes. If it is not"
            " set, mamba_full_memory_ratio decides.",
            at_least(1),
            unit="requests",
        ),
    ] = None
    mamba_ssm_dtype: Annotated[
        Literal["float32", "bfloat16"], Arg("Dtype in which recurrent states are kept between steps.")
    ] = "float32"
    mamba_full_memory_ratio: Annotated[
        float,
        Arg(
            "Memory for recurrent states as a fraction of that for the KV pool. Running requests always have a state;"
            " what is left keeps those of cached prefixes.",
            above(0),
            metavar="RATIO",
        ),
    ] = 0.2
    mamba_scheduler_strategy: Annotated[
        Literal["auto", "no_buffer", "extra_buffer"],
        Arg("Whether a second copy of the recurrent state allows steps to overlap.", planned=_SECOND_COPY),
    ] = "auto"
    mamba_track_interval: Annotated[
        int,
        Arg(
            "Output tokens between two places where a request saves its recurrent state for the prefix cache, at the"
            " end of a page.",
            at_least(1),
            unit="tokens",
        ),
    ] = 256
