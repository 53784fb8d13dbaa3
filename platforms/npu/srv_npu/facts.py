"""What is known of Ascend NPUs without one: variants, profiles, capabilities, defaults, backends.

Limits are those that the fused attention operator documents (op-plugin, npu_fused_infer_attention_score).
"""

from __future__ import annotations

from srv.platform.facts import BackendSpec, Default, DeviceFacts, PlatformFacts, Requires, Seen, Unfit

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


def _fits(seen: Seen) -> Requires:
    return Requires()


DEFAULTS = (
    Default("chunked_prefill_size", _chunk, "cards of up to 32 GiB have room for 4096 tokens, up to 64 GiB for 8192"),
)

BACKENDS = {
    "attention": (
        BackendSpec(
            name="ascend",
            priority=10,
            check=_ascend,
            target="srv_npu.unbuilt:create",
            kv_order="page_token_head",
            summary="torch_npu's fused attention over 128-token pages",
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_fits,
            target="srv_npu.unbuilt:create",
            summary="sorting and cumulative sums in torch",
        ),
    ),
}

FACTS = PlatformFacts(capabilities, PROFILES, defaults=DEFAULTS, backends=BACKENDS)
