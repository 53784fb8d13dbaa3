"""Attention backends of NVIDIA GPUs but the Triton kernels: what each demands of device, model and pages.

Page sizes are those that the kernels are compiled for. Priorities put them in the order of SGLang's own choice; what
that leaves to another backend although the kernels could do it is refused to the automatic choice alone
(`_left_to_others`), so that a user may still name them.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv_cuda.placeholder import PLACEHOLDER

_SINKS = frozenset({"GptOssForCausalLM"})
_CHUNKED = ("Llama4",)
_FLASHINFER_HEADS = (64, 128, 256)
_E5M2 = "fp8_e5m2"


def without_package(context: ResolutionContext) -> list[str]:
    """A reason if FlashInfer is missing. Versions are known of a machine that was probed, and of no profile: there
    its presence is assumed.
    """
    if not context.device.versions or "flashinfer-python" in context.device.versions:
        return []
    return ["the package flashinfer-python is not installed"]


def _family_reasons(context: ResolutionContext) -> list[str]:
    """Why FlashInfer's wrappers cannot serve a family: attention sinks, or attention within chunks."""
    model = context.model
    if model is None:
        return []
    if model.architecture in _SINKS:
        return [f"{model.architecture} has attention sinks, which only fa3, trtllm_mha and triton compute"]
    if model.architecture.startswith(_CHUNKED):
        return [f"{model.architecture} attends within chunks, which only fa3 and triton compute"]
    return []


def _latent(context: ResolutionContext) -> bool:
    return context.model is not None and "kv_lora_rank" in context.model.config


def _left_to_others(context: ResolutionContext, name: str, why: str) -> list[str]:
    """A reason for the automatic choice: none if the user names the backend."""
    namings = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return [] if name in [context[naming] for naming in namings] else [f"{why}, unless it is named"]


def _tree(context: ResolutionContext) -> bool:
    return context["speculative_eagle_topk"] not in (None, 1)


def flashinfer(context: ResolutionContext) -> Requires | Unfit:
    """FlashInfer compiles for certain head sizes, latent attention apart, and is a package of its own."""
    model, variant, reasons = context.model, context.device.variant, without_package(context)
    if model is not None and not _latent(context) and model.head_dim not in _FLASHINFER_HEADS:
        reasons.append(f"head_dim {model.head_dim} is not among {', '.join(map(str, _FLASHINFER_HEADS))}")
    reasons += _family_reasons(context)
    if _latent(context) and variant != "sm100":
        reasons += _left_to_others(context, "flashinfer", f"on {variant} latent attention is left to other kernels")
    if context["kv_cache_dtype"] == _E5M2 and variant == "sm90":
        reasons += _left_to_others(context, "flashinfer", f"on sm90 a pool in {_E5M2} is left to triton")
    return Unfit(tuple(reasons)) if reasons else Requires()


def _fa3(context: ResolutionContext) -> Requires | Unfit:
    """FlashAttention 3: every kind of attention, on one variant."""
    reasons = _variant_reasons(context, ("sm90",))
    if context["kv_cache_dtype"] == _E5M2:
        reasons.append(f"it reads no pool in {_E5M2}")
    if _tree(context) and context.model is not None and not _latent(context):
        reasons += _left_to_others(
            context, "fa3", "a tree of guesses is left to flashinfer (speculative_eagle_topk above 1)"
        )
    return Unfit(tuple(reasons)) if reasons else Requires()


def _trtllm_mha(context: ResolutionContext) -> Requires | Unfit:
    """Prompts on compute capability 10.0 alone, output also on 9.0."""
    reasons = _variant_reasons(context, ("sm90", "sm100"))
    if _latent(context):
        reasons.append("it computes no latent attention")
    if context.model is not None and context.model.architecture.startswith(_CHUNKED):
        reasons.append(f"{context.model.architecture} attends within chunks, which only fa3 and triton compute")
    if _tree(context):
        reasons.append("it checks one guess at each depth only (speculative_eagle_topk above 1)")
    slots = () if context.device.variant == "sm100" else ("decode_attention_backend",)
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (64, 32, 16)}, slots)


def _latent_only(
    variants: tuple[str, ...], pages: tuple[int, ...], types: tuple[str, ...] = ()
) -> Callable[[ResolutionContext], Requires | Unfit]:
    """A check for kernels of latent attention, of these variants and page sizes (best first).

    types: what the KV pool may hold, if not everything.
    """

    def check(context: ResolutionContext) -> Requires | Unfit:
        reasons = _variant_reasons(context, variants)
        if context.model is not None and not _latent(context):
            reasons.append("it computes latent attention (MLA) only")
        wanted: dict[str, tuple[int | str, ...]] = {"page_size": pages}
        if types and context["kv_cache_dtype"] is not None:
            wanted["kv_cache_dtype"] = types
        return Unfit(tuple(reasons)) if reasons else Requires(wanted)

    return check


def _variant_reasons(context: ResolutionContext, variants: tuple[str, ...]) -> list[str]:
    if context.device.variant in variants:
        return []
    return [f"its kernels are for {', '.join(variants)}, not {context.device.variant}"]


def _dual_chunk(context: ResolutionContext) -> Requires | Unfit:
    """It knows models that were trained for two chunk lengths; its steps hold prompts or output and reuse no prefix."""
    if context.model is not None and "dual_chunk_attention_config" not in context.model.config:
        return Unfit((f"{context.model.architecture} has no dual_chunk_attention_config",))
    return Requires({"enable_mixed_chunk": (False,), "disable_graphs": (True,), "disable_radix_cache": (True,)})


SPECS = (
    # The first two are each the best of one variant, and on the other nothing (or, for output, the second).
    PLACEHOLDER.attention("fa3", 30, _fa3),
    PLACEHOLDER.attention("trtllm_mha", 25, _trtllm_mha),
    PLACEHOLDER.attention("flashinfer", 20, flashinfer),
    PLACEHOLDER.attention(
        "trtllm_mla",
        3,
        _latent_only(("sm100",), (64, 32), types=("auto", "fp8_e4m3")),
    ),
    PLACEHOLDER.attention("flashmla", 2, _latent_only(("sm90", "sm100"), (64,))),
    PLACEHOLDER.attention("cutlass_mla", 1, _latent_only(("sm100",), (128,))),
    PLACEHOLDER.attention("dual_chunk_flash_attn", 0, _dual_chunk),
)
