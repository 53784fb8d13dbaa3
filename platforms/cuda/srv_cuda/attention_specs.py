"""Attention backends of NVIDIA GPUs beside those chosen by default: what each demands of device, model and pages.

They come after the default ones in priority. Page sizes are those that the kernels are compiled for.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.facts import BackendSpec, Requires, Seen, Unfit

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


def _spec(name: str, priority: int, summary: str, check: Callable[[Seen], Requires | Unfit]) -> BackendSpec:
    return BackendSpec(name, priority, check, "srv_cuda.unbuilt:create", "page_token_head", summary)


SPECS = (
    _spec("fa3", 5, "FlashAttention 3, for compute capability 9.0", _check(("sm90",), (), latent=False)),
    _spec("trtllm_mha", 4, "TensorRT-LLM's kernels for MHA and GQA", _check(("sm100",), (64, 32, 16), latent=False)),
    _spec(
        "trtllm_mla",
        3,
        "TensorRT-LLM's kernels for latent attention",
        _check(("sm100",), (64, 32), latent=True, types=("auto", "fp8_e4m3")),
    ),
    _spec("flashmla", 2, "FlashMLA, for latent attention", _check(("sm90", "sm100"), (64,), latent=True)),
    _spec("cutlass_mla", 1, "CUTLASS kernels for latent attention", _check(("sm100",), (128,), latent=True)),
)
