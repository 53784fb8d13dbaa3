"""Arguments that divide a device's memory."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, between, fraction
from srv.args.spec import Arg

_WINDOWS = "pools of their own for layers with a sliding window are not implemented yet"
_STATES = "models with recurrent state (Mamba) are not implemented yet"


class MemoryArgs(NamedTuple):
    """How much memory weights and KV pool take, and how the pool is cut."""

    mem_fraction_static: Annotated[
        float, Arg("Part of the device's memory for weights and KV pool together.", fraction(), metavar="FRACTION")
    ] = 0.88
    max_total_tokens: Annotated[
        int | None,
        Arg("Most tokens in the KV pool; if not set, memory alone is the limit.", at_least(2), unit="tokens"),
    ] = None
    page_size: Annotated[
        int, Arg("Tokens in one page of the KV pool.", at_least(1), needs="paged_kv", unit="tokens")
    ] = 1
    disable_radix_cache: Annotated[bool, Arg("Do not keep the KV of finished requests for equal prefixes.")] = False
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu"],
        Arg(
            "Which cached prefix makes room first: the one not used for longest, or the one used least.",
            planned="prefixes make room in the order of their last use; no other order is implemented yet",
        ),
    ] = "lru"
    hybrid_kvcache_ratio: Annotated[
        float | None,
        Arg(
            "Between one pool for all layers (0) and a pool for windowed layers that is as small as it can be (1).",
            between(0, 1),
            planned=_WINDOWS,
            metavar="RATIO",
            bare="0.5",
        ),
    ] = None
    swa_full_tokens_ratio: Annotated[
        float,
        Arg(
            "Tokens that the pool of windowed layers holds for each token of the full layers' pool.",
            between(0, 1),
            planned=_WINDOWS,
            metavar="RATIO",
        ),
    ] = 0.8
    disable_hybrid_swa_memory: Annotated[
        bool, Arg("Keep windowed layers in the same pool as all others.", planned=_WINDOWS)
    ] = False
    max_mamba_cache_size: Annotated[
        int | None, Arg("Most requests whose recurrent state is kept.", at_least(1), planned=_STATES, unit="requests")
    ] = None
    mamba_ssm_dtype: Annotated[Literal["float32", "bfloat16"], Arg("Type of the recurrent state.", planned=_STATES)] = (
        "float32"
    )
    mamba_full_memory_ratio: Annotated[
        float,
        Arg(
            "Memory for recurrent state as a part of that for full attention.",
            above(0),
            planned=_STATES,
            metavar="RATIO",
        ),
    ] = 0.2
    mamba_scheduler_strategy: Annotated[
        Literal["auto", "no_buffer", "extra_buffer"],
        Arg("Whether a second copy of the recurrent state lets steps overlap.", planned=_STATES),
    ] = "auto"
    mamba_track_interval: Annotated[
        int, Arg("Output tokens between two kept recurrent states.", at_least(1), planned=_STATES, unit="tokens")
    ] = 256
