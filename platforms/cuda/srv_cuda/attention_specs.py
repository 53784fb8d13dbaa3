"""Attention backends of NVIDIA GPUs but the Triton kernels: what each demands of device, model and pages.

Page sizes are those that the kernels are compiled for. Priorities put them in the order of SGLang's own choice; what
that leaves to another backend although the kernels could do it is refused to the automatic choice alone
(`_left_to_others`), so that a user may still name them.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.facts import Requires, Seen, Unfit
from srv_cuda.unbuilt import UNBUILT

_SINKS = frozenset({"GptOssForCausalLM"})
_CHUNKED = ("Llama4",)
_FLASHINFER_HEADS = (64, 128, 256)
_E5M2 = "fp8_e5m2"


def without_package(seen: Seen) -> list[str]:
    """A reason if FlashInfer is missing. Versions are known of a machine that was probed, and of no profile: there
    its presence is assumed.
    """
    if not seen.device.versions or "flashinfer-python" in seen.device.versions:
        return []
    return ["the package flashinfer-python is not installed"]


def _family_reasons(seen: Seen) -> list[str]:
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


def _left_to_others(seen: Seen, name: str, why: str) -> list[str]:
    """A reason for the automatic choice: none if the user names the backend."""
    namings = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [] if name in [seen[naming] for naming in namings] else [f"{why}, unless it is named"]


def _tree(seen: Seen) -> bool:
    return seen["speculative_eagle_topk"] not in (None, 1)


def flashinfer(seen: Seen) -> Requires | Unfit:
    """FlashInfer compiles for certain head sizes, latent attention apart, and is a package of its own."""
    model, variant, reasons = seen.model, seen.device.variant, without_package(seen)
    if model is not None and not _latent(seen) and model.head_dim not in _FLASHINFER_HEADS:
        reasons.append(f"head_dim {model.head_dim} is not among {', '.join(map(str, _FLASHINFER_HEADS))}")
    reasons += _family_reasons(seen)
    if _latent(seen) and variant != "sm100":
        reasons += _left_to_others(seen, "flashinfer", f"on {variant} latent attention is left to other kernels")
    if seen["kv_cache_dtype"] == _E5M2 and variant == "sm90":
        reasons += _left_to_others(seen, "flashinfer", f"on sm90 a pool in {_E5M2} is left to triton")
    return Unfit(tuple(reasons)) if reasons else Requires()


def _fa3(seen: Seen) -> Requires | Unfit:
    """FlashAttention 3: every kind of attention, on one variant."""
    reasons = _variant_reasons(seen, ("sm90",))
    if seen["kv_cache_dtype"] == _E5M2:
        reasons.append(f"it reads no pool in {_E5M2}")
    if _tree(seen) and seen.model is not None and not _latent(seen):
        reasons += _left_to_others(
            seen, "fa3", "a tree of guesses is left to flashinfer (speculative_eagle_topk above 1)"
        )
    return Unfit(tuple(reasons)) if reasons else Requires()


def _trtllm_mha(seen: Seen) -> Requires | Unfit:
    """Prompts on compute capability 10.0 alone, output also on 9.0."""
    reasons = _variant_reasons(seen, ("sm90", "sm100"))
    if _latent(seen):
        reasons.append("it computes no latent attention")
    if seen.model is not None and seen.model.architecture.startswith(_CHUNKED):
        reasons.append(f"{seen.model.architecture} attends within chunks, which only fa3 and triton compute")
    if _tree(seen):
        reasons.append("it checks one guess at each depth only (speculative_eagle_topk above 1)")
    slots = () if seen.device.variant == "sm100" else ("decode_attention_backend",)
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (64, 32, 16)}, slots)


def _latent_only(
    variants: tuple[str, ...], pages: tuple[int, ...], types: tuple[str, ...] = ()
) -> Callable[[Seen], Requires | Unfit]:
    """A check for kernels of latent attention, of these variants and page sizes (best first).

    types: what the KV pool may hold, if not everything.
    """

    def check(seen: Seen) -> Requires | Unfit:
        reasons = _variant_reasons(seen, variants)
        if seen.model is not None and not _latent(seen):
            reasons.append("it computes latent attention (MLA) only")
        wanted: dict[str, tuple[int | str, ...]] = {"page_size": pages}
        if types and seen["kv_cache_dtype"] is not None:
            wanted["kv_cache_dtype"] = types
        return Unfit(tuple(reasons)) if reasons else Requires(wanted)

    return check


def _variant_reasons(seen: Seen, variants: tuple[str, ...]) -> list[str]:
    if seen.device.variant in variants:
        return []
    return [f"its kernels are for {', '.join(variants)}, not {seen.device.variant}"]


def _dual_chunk(seen: Seen) -> Requires | Unfit:
    """It knows models that were trained for two chunk lengths; its steps hold prompts or output and reuse no prefix."""
    if seen.model is not None and "dual_chunk_attention_config" not in seen.model.config:
        return Unfit((f"{seen.model.architecture} has no dual_chunk_attention_config",))
    return Requires({"enable_mixed_chunk": (False,), "disable_graphs": (True,), "disable_radix_cache": (True,)})


SPECS = (
    # The first two are each the best of one variant, and on the other nothing (or, for output, the second).
    UNBUILT.attention("fa3", 30, "FlashAttention 3, for compute capability 9.0", _fa3),
    UNBUILT.attention("trtllm_mha", 25, "TensorRT-LLM's kernels for MHA and GQA", _trtllm_mha),
    UNBUILT.attention("flashinfer", 20, "FlashInfer's wrappers for paged KV, layout NHD", flashinfer),
    UNBUILT.attention(
        "trtllm_mla",
        3,
        "TensorRT-LLM's kernels for latent attention",
        _latent_only(("sm100",), (64, 32), types=("auto", "fp8_e4m3")),
    ),
    UNBUILT.attention("flashmla", 2, "FlashMLA, for latent attention", _latent_only(("sm90", "sm100"), (64,))),
    UNBUILT.attention("cutlass_mla", 1, "CUTLASS kernels for latent attention", _latent_only(("sm100",), (128,))),
    UNBUILT.attention("dual_chunk_flash_attn", 0, "FlashAttention in two chunk lengths", _dual_chunk),
)
