"""Attention backends of NVIDIA GPUs except Triton.

Where SGLang prefers another backend although FlashInfer's kernels would work, only the automatic choice skips them
(`_not_automatic`), and a user can still select them.
"""

from __future__ import annotations

from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv_gpu.facts import FLASHINFER_HEADS, attention, half_reasons, not_called
from srv_gpu.tools import missing_flashinfer

# The kernels of others that srv does not call, best first, and the variants that they are for; () for all.
NOT_CALLED = {
    "fa3": ("sm90",),
    "trtllm_mha": ("sm90", "sm100"),
    "trtllm_mla": ("sm100",),
    "flashmla": ("sm90", "sm100"),
    "cutlass_mla": ("sm100",),
    "dual_chunk_flash_attn": (),
}


def _is_latent(context: ResolutionContext) -> bool:
    return context.model is not None and "kv_lora_rank" in context.model.config


def _not_automatic(context: ResolutionContext, name: str, why: str) -> list[str]:
    """A reason to exclude a backend from the automatic choice; none if the user selects it."""
    arguments = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [] if name in [context[argument] for argument in arguments] else [f"{why}, unless the user selects it"]


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


SPECS = (
    attention("flashinfer", 20, flashinfer, "srv_gpu.flashinfer_attention:FlashInferAttention", lengths="host"),
    *(not_called(name, 9 - place, variants) for place, (name, variants) in enumerate(NOT_CALLED.items())),
)
