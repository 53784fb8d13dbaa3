"""Arguments of the cache tiers below the KV pool: host memory and storage."""

from typing import Annotated, Literal, NamedTuple

from srv.args.spec import Arg

_TIERS = "cache tiers below the KV pool (host memory, storage) are not implemented yet"


class CacheArgs(NamedTuple):
    """How much of the prefix cache is kept outside the device, and how it is copied there."""

    enable_hierarchical_cache: Annotated[bool, Arg("Also keep cached prefixes in host memory.", planned=_TIERS)] = False
    hicache_ratio: Annotated[
        float,
        Arg("Size of the host KV pool as a multiple of the device KV pool.", planned=_TIERS, metavar="RATIO"),
    ] = 2.0
    hicache_size: Annotated[
        int,
        Arg("Size of the host KV pool; if 0, --hicache-ratio determines it.", planned=_TIERS, unit="GB"),
    ] = 0
    hicache_write_policy: Annotated[
        Literal["write_back", "write_through", "write_through_selective"],
        Arg(
            "When pages are copied to the host: on eviction, immediately, or immediately if used often.", planned=_TIERS
        ),
    ] = "write_through"
    hicache_io_backend: Annotated[
        str, Arg("Method that copies pages between tiers.", planned=_TIERS, metavar="NAME")
    ] = "kernel"
    hicache_mem_layout: Annotated[
        Literal["layer_first", "page_first", "page_first_direct", "page_first_kv_split"],
        Arg("Memory layout of the host KV pool.", planned=_TIERS),
    ] = "layer_first"
    hicache_storage_backend: Annotated[
        Literal["file", "mooncake", "hf3fs", "nixl"] | None, Arg("Storage backend below host memory.", planned=_TIERS)
    ] = None
    hicache_storage_prefetch_policy: Annotated[
        Literal["best_effort", "wait_complete", "timeout"],
        Arg("How long a request waits for pages of its prefix that are fetched from storage.", planned=_TIERS),
    ] = "best_effort"
    hicache_storage_backend_extra_config: Annotated[
        str | None,
        Arg("JSON object of settings for the storage backend.", planned=_TIERS, metavar="JSON"),
    ] = None
    enable_lmcache: Annotated[
        bool, Arg("Let LMCache manage the cache tiers.", planned="LMCache is not supported yet")
    ] = False
