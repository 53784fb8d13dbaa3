"""Attention backends of NVIDIA GPUs beside those chosen by default: what each demands of device, model and pages.

Page sizes are those that the kernels are compiled for.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.facts import Requires, Seen, Unfit
from srv_cuda.unbuilt import UNBUILT

_SINKS = frozenset({"GptOssForCausalLM"})
_CHUNKED = ("Llama4",)


def model_reasons(seen: Seen) -> list[str]:
    """Why FlashInfer's wrappers cannot serve a family: attention sinks, or attention within chunks."""
    model = seen.model
    if model is None:
        return []
    if model.architecture in _SINKS:
        return [f"{model.architecture} has attention sinks, which only fa3, trtllm_mha and triton compute"]
    if model.architecture.startswith(_CHUNKED):
        return [f"{model.architecture} attends within chunks, which only fa3 and triton compute"]
    return []


def _latent(seen: Seen) -> bool:
    return seen.model is not None and "kv_lora_rank" in seen.model.config


def _check(
    variants: tuple[str, ...], pages: tuple[int, ...], latent: bool, types: tuple[str, ...] = ()
) -> Callable[[Seen], Requires | Unfit]:
    """A check for kernels of these variants, page sizes (best first) and kind of attention.

    types: what the KV pool may hold, if not everything.
    """

    def check(seen: Seen) -> Requires | Unfit:
        reasons: list[str] = []
        if seen.device.variant not in variants:
            reasons.append(f"its kernels are for {', '.join(variants)}, not {seen.device.variant}")
        if seen.model is not None and _latent(seen) != latent:
            reasons.append("it computes latent attention (MLA) only" if latent else "it computes no latent attention")
        if not latent and seen.model is not None and 64 in pages and seen.model.architecture.startswith(_CHUNKED):
            reasons.append(f"{seen.model.architecture} attends within chunks, which only fa3 and triton compute")
        if seen["speculative_eagle_topk"] not in (None, 1) and not latent and pages:
            reasons.append("it checks one guess at each depth only (speculative_eagle_topk above 1)")
        wanted: dict[str, tuple[int | str, ...]] = {"page_size": pages} if pages else {}
        if types and seen["kv_cache_dtype"] is not None:
            wanted["kv_cache_dtype"] = types
        return Unfit(tuple(reasons)) if reasons else Requires(wanted)

    return check


def _dual_chunk(seen: Seen) -> Requires | Unfit:
    """It knows models that were trained for two chunk lengths; its steps hold prompts or output and reuse no prefix."""
    if seen.model is not None and "dual_chunk_attention_config" not in seen.model.config:
        return Unfit((f"{seen.model.architecture} has no dual_chunk_attention_config",))
    return Requires({"enable_mixed_chunk": (False,), "disable_graphs": (True,), "disable_radix_cache": (True,)})


SPECS = (
    # Both come before the Triton kernels, for what FlashInfer cannot serve; no device has both.
    UNBUILT.attention("fa3", 15, "FlashAttention 3, for compute capability 9.0", _check(("sm90",), (), latent=False)),
    UNBUILT.attention(
        "trtllm_mha", 14, "TensorRT-LLM's kernels for MHA and GQA", _check(("sm100",), (64, 32, 16), latent=False)
    ),
    UNBUILT.attention(
        "trtllm_mla",
        3,
        "TensorRT-LLM's kernels for latent attention",
        _check(("sm100",), (64, 32), latent=True, types=("auto", "fp8_e4m3")),
    ),
    UNBUILT.attention("flashmla", 2, "FlashMLA, for latent attention", _check(("sm90", "sm100"), (64,), latent=True)),
    UNBUILT.attention(
        "cutlass_mla", 1, "CUTLASS kernels for latent attention", _check(("sm100",), (128,), latent=True)
    ),
    UNBUILT.attention("dual_chunk_flash_attn", 0, "FlashAttention in two chunk lengths", _dual_chunk),
)
