"""Defaults and constraints of arguments on AMD GPUs, and the requirements of aiter's attention."""

from __future__ import annotations

from srv.args.rules.reserve import RESERVED_MEMORY, published_contributions, published_fraction
from srv.args.rules.speculative import draft_tree_constraint
from srv.platform.facts import Contribution, Default, Requires, ResolutionContext, Unfit
from srv.specs import ModelFacts, attention_specs
from srv_gpu.facts import AITER_GROUP, AITER_HEADS, NUM_KV_SPLITS, half_reasons
from srv_gpu.fp8_defaults import FP8_PRODUCTS
from srv_gpu.tools import missing_aiter

_INSTINCT = ("gfx942", "gfx950")
_LATENT_HEADS = (16, 128)
_LONG_CONTEXT = 8192


def aiter(context: ResolutionContext) -> Requires | Unfit:
    """aiter's attention reads pages of one token, or of 16; MLA only with some head counts.

    Its kernels are for 16-bit dtypes, certain heads, and Instinct GPUs.
    """
    reasons: list[str] = []
    if context.device.variant not in _INSTINCT:
        reasons.append(f"its kernels are for {', '.join(_INSTINCT)}, not {context.device.variant}")
    reasons += missing_aiter(context.device)
    reasons += half_reasons(context)
    model = context.model
    latent = model is not None and "kv_lora_rank" in model.config
    if model is not None and latent and model.heads not in _LATENT_HEADS:
        allowed = " or ".join(map(str, _LATENT_HEADS))
        reasons.append(f"latent attention needs {allowed} heads per rank, not {model.heads}")
    if model is not None and not latent:
        reasons += _head_reasons(model)
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (1,) if latent else (1, 16)})


def _head_reasons(model: ModelFacts) -> list[str]:
    reasons: list[str] = []
    for group in attention_specs(model.cache_groups):
        if group.key_dim != group.value_dim or group.key_dim not in AITER_HEADS:
            dims = f"keys of {group.key_dim} and values of {group.value_dim} elements"
            reasons.append(f"{dims} are not both {' or both '.join(map(str, AITER_HEADS))}")
        if model.heads // group.kv_heads > AITER_GROUP:
            reasons.append(f"{model.heads // group.kv_heads} query heads share a KV head, more than {AITER_GROUP}")
    return list(dict.fromkeys(reasons))


def _long_context_reserve(context: ResolutionContext) -> float:
    """The fraction of the remaining memory that aiter's kernels need for the splits of a long context."""
    uses_aiter = "aiter" in (context["prefill_attention_backend"], context["decode_attention_backend"])
    long = context["context_length"] is not None and context["context_length"] > _LONG_CONTEXT
    return 0.15 if uses_aiter and long else 0.0


DEFAULTS = (
    Default(
        NUM_KV_SPLITS,
        lambda context: 16,
        "it is the published default for these devices",
    ),
    FP8_PRODUCTS,
    published_fraction(),
)

CONTRIBUTIONS = (
    *published_contributions(),
    Contribution(
        RESERVED_MEMORY,
        "long_contexts",
        _long_context_reserve,
        f"aiter's attention needs 15 % of the remaining memory for contexts of more than {_LONG_CONTEXT} tokens",
        reads=("prefill_attention_backend", "decode_attention_backend", "context_length"),
        of_remaining=True,
    ),
)

CONSTRAINTS = (draft_tree_constraint(),)
