"""What is known of Ascend NPUs without one: variants, profiles, capabilities, defaults, backends.

Limits are those that the fused attention operator documents (op-plugin, npu_fused_infer_attention_score).
"""

from __future__ import annotations

from srv.args.rules.reserve import graph_rows, published, published_fraction
from srv.args.rules.speculative import trees_by_token
from srv.platform.facts import Default, DeviceFacts, PlatformFacts, Requires, Seen, Unfit
from srv_npu.support import SUPPORT
from srv_npu.unbuilt import UNBUILT

VARIANTS = ("a2", "a3")

_GIB = 1 << 30
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_HEAD_DIM = 512

PROFILES = {
    "a2": DeviceFacts("a2", 64 * _GIB, 1, "Ascend 910B, Atlas 800I A2"),
    "a2-32gb": DeviceFacts("a2", 32 * _GIB, 1, "Ascend 910B4, 32 GB"),
    "a3": DeviceFacts("a3", 64 * _GIB, 1, "Ascend 910_93, one die of Atlas 800I A3"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """No float32: attention computes in 16 bits."""
    return frozenset({"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "float16", "bfloat16"})


def _chunk(seen: Seen) -> int | None:
    memory = seen.device.memory_bytes
    if memory <= 32 * _GIB:
        return 4096
    return 8192 if memory <= 64 * _GIB else None


def _ascend(seen: Seen) -> Requires | Unfit:
    """Pages of 128 tokens are the only size that prefill, decode and graph decode all take."""
    model = seen.model
    reasons: list[str] = []
    if model is not None:
        group = model.heads // max(1, model.kv_heads)
        if model.heads > _MAX_HEADS:
            reasons.append(f"{model.heads} query heads are more than {_MAX_HEADS}")
        if group > _MAX_GROUP:
            reasons.append(f"{group} query heads share one KV head, and {_MAX_GROUP} may")
        if model.head_dim > _MAX_HEAD_DIM:
            reasons.append(f"head_dim {model.head_dim} is more than {_MAX_HEAD_DIM}")
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (128,)})


def _graph_rows(seen: Seen) -> int:
    memory, wide = seen.device.memory_bytes, seen["tp_size"] >= 4
    if memory <= 32 * _GIB:
        return 64 if wide else 16
    return (256 if wide else 64) if memory <= 64 * _GIB else graph_rows(seen)


def _graph_batch(seen: Seen) -> int | None:
    return None if seen["disable_graphs"] else _graph_rows(seen)


def _tier_layout(seen: Seen) -> str | None:
    if not seen["enable_hierarchical_cache"]:
        return None
    latent = seen.model is not None and "kv_lora_rank" in seen.model.config
    return "page_first_kv_split" if latent else "page_first_direct"


DEFAULTS = (
    Default(
        "disable_hybrid_swa_memory",
        lambda seen: False,
        "the KV pool keeps one kind of layer anyway, whatever the family of the model",
    ),
    Default("chunked_prefill_size", _chunk, "cards of up to 32 GiB have room for 4096 tokens, up to 64 GiB for 8192"),
    Default(
        "graph_max_batch_size",
        _graph_batch,
        "graphs of that size fit into cards of up to 32 or 64 GiB, and into more of them together",
        reads=("disable_graphs", "tp_size"),
    ),
    Default(
        "hicache_io_backend",
        lambda seen: "kernel_ascend" if seen["enable_hierarchical_cache"] else None,
        "its kernel copies pages between host and device",
        reads=("enable_hierarchical_cache",),
    ),
    Default(
        "hicache_mem_layout",
        _tier_layout,
        "the copy kernel reads whole pages, latent ones in two parts",
        reads=("enable_hierarchical_cache",),
    ),
    published_fraction(),
)

BACKENDS = {
    "attention": (UNBUILT.attention("ascend", 10, "torch_npu's fused attention over 128-token pages", _ascend),),
    "sampling": (
        UNBUILT.backend("pytorch", 10, "sorting and cumulative sums in torch"),
        UNBUILT.backend("ascend", 5, "torch_npu's fused top-k and top-p"),
    ),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=published(_graph_rows),
    constraints=(trees_by_token(),),
    backends=BACKENDS,
    support=SUPPORT,
)
