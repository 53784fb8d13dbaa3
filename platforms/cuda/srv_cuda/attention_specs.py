"""Attention backends of NVIDIA GPUs except Triton: their requirements on device, model and page size.

Page sizes are those that the kernels are compiled for. Priorities follow the order in which SGLang chooses a backend.
Where SGLang prefers another backend although these kernels would work, only the automatic choice skips them
(`_not_automatic`), and a user can still select them. Of these kernels, this version calls FlashInfer's alone
(`not_called`): the others keep their rules, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv_gpu.facts import FLASHINFER_HEADS, attention, half_reasons, not_called
from srv_gpu.tools import missing_flashinfer

_CHUNKED = ("Llama4",)
_E5M2 = "fp8_e5m2"


def _is_latent(context: ResolutionContext) -> bool:
    return context.model is not None and "kv_lora_rank" in context.model.config


def _not_automatic(context: ResolutionContext, name: str, why: str) -> list[str]:
    """A reason to exclude a backend from the automatic choice; none if the user selects it."""
    arguments = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [] if name in [context[argument] for argument in arguments] else [f"{why}, unless the user selects it"]


def _has_draft_tree(context: ResolutionContext) -> bool:
    return context["speculative_eagle_topk"] not in (None, 1)


def flashinfer(context: ResolutionContext) -> Requires | Unfit:
    """FlashInfer is a separate package, which compiles its kernels unless they are prebuilt.

    They support certain head sizes, and latent attention.
    """
    model, variant = context.model, context.device.variant
    reasons = [*missing_flashinfer(context.device), *half_reasons(context)]
    if model is not None and not _is_latent(context) and model.head_dim not in FLASHINFER_HEADS:
        reasons.append(f"head_dim {model.head_dim} is not among {', '.join(map(str, FLASHINFER_HEADS))}")
    if _is_latent(context) and variant != "sm100":
        reasons += _not_automatic(context, "flashinfer", f"on {variant} other kernels compute latent attention")
    return Unfit(tuple(reasons)) if reasons else Requires()


def _fa3(context: ResolutionContext) -> Requires | Unfit:
    """FlashAttention 3 supports every kind of attention, but only on sm90."""
    reasons = _variant_reasons(context, ("sm90",))
    if context["kv_cache_dtype"] == _E5M2:
        reasons.append(f"it does not support a KV pool in {_E5M2}")
    if _has_draft_tree(context) and context.model is not None and not _is_latent(context):
        reasons += _not_automatic(context, "fa3", "flashinfer verifies draft trees (speculative_eagle_topk above 1)")
    return Unfit(tuple(reasons)) if reasons else Requires()


def _trtllm_mha(context: ResolutionContext) -> Requires | Unfit:
    """TensorRT-LLM's MHA kernels: decode on sm90 and sm100, prefill only on sm100."""
    reasons = _variant_reasons(context, ("sm90", "sm100"))
    if _is_latent(context):
        reasons.append("it does not compute latent attention (MLA)")
    if context.model is not None and context.model.architecture.startswith(_CHUNKED):
        reasons.append(f"{context.model.architecture} attends within chunks, which its kernels do not compute")
    if _has_draft_tree(context):
        reasons.append("it does not verify draft trees (speculative_eagle_topk above 1)")
    slots = () if context.device.variant == "sm100" else ("decode_attention_backend",)
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (64, 32, 16)}, slots)


def _latent_only(
    variants: tuple[str, ...], pages: tuple[int, ...], types: tuple[str, ...] = ()
) -> Callable[[ResolutionContext], Requires | Unfit]:
    """A check for kernels that compute only latent attention, on these variants, with these page sizes (best first).

    types: the values of kv_cache_dtype that they support; empty for all.
    """

    def check(context: ResolutionContext) -> Requires | Unfit:
        reasons = _variant_reasons(context, variants)
        if context.model is not None and not _is_latent(context):
            reasons.append("it computes latent attention (MLA) only")
        required: dict[str, tuple[int | str, ...]] = {"page_size": pages}
        if types and context["kv_cache_dtype"] is not None:
            required["kv_cache_dtype"] = types
        return Unfit(tuple(reasons)) if reasons else Requires(required)

    return check


def _variant_reasons(context: ResolutionContext, variants: tuple[str, ...]) -> list[str]:
    if context.device.variant in variants:
        return []
    return [f"its kernels are for {', '.join(variants)}, not {context.device.variant}"]


def _dual_chunk(context: ResolutionContext) -> Requires | Unfit:
    """Dual chunk attention supports no mixed steps of prefill and decode, no graphs and no prefix cache."""
    if context.model is not None and "dual_chunk_attention_config" not in context.model.config:
        return Unfit((f"{context.model.architecture} has no dual_chunk_attention_config",))
    return Requires({"enable_mixed_chunk": (False,), "disable_graphs": (True,), "disable_radix_cache": (True,)})


# The rules of kernels that are not called, by name. fa3 is the best on sm90, and trtllm_mha on sm100; on the other
# variant they are not available, except that trtllm_mha decodes on sm90.
RULES: Mapping[str, Callable[[ResolutionContext], Requires | Unfit]] = {
    "fa3": _fa3,
    "trtllm_mha": _trtllm_mha,
    "trtllm_mla": _latent_only(("sm100",), (64, 32), types=("auto", "fp8_e4m3")),
    "flashmla": _latent_only(("sm90", "sm100"), (64,)),
    "cutlass_mla": _latent_only(("sm100",), (128,)),
    "dual_chunk_flash_attn": _dual_chunk,
}
_PRIORITIES = dict(zip(RULES, (30, 25, 7, 6, 5, 4), strict=True))

SPECS = (
    attention("flashinfer", 20, flashinfer, "srv_gpu.flashinfer_attention:FlashInferAttention", lengths="host"),
    *(not_called(name, _PRIORITIES[name], rule) for name, rule in RULES.items()),
)
