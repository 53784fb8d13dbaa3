"""Rules for pooled hidden states: how the checkpoint pools, and what models that generate no text exclude."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.platform.facts import Constraint, Default, ResolutionContext
from srv.types import Pooling

# What attention in both directions requires, whichever backend computes it: it keeps no keys, so that a prompt is one
# row of one step, and steps cannot be replayed.
WHOLE_PROMPTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "chunked_prefill_size": (-1,),
        "disable_radix_cache": (True,),
        "disable_graphs": (True,),
        "enable_torch_compile": (False,),
    }
)
_SUPPORTED = frozenset(Pooling)
_ONLY_POOLED = "the model generates no text, and all that it serves is computed from pooled hidden states"


def _pooling(context: ResolutionContext) -> str | None:
    model = context.model
    return model.pooling if model is not None and model.pooling in _SUPPORTED else None


def _only_pooled(context: ResolutionContext) -> bool | None:
    return True if context.model is not None and not context.model.generates else None


def _nothing_to_serve(context: ResolutionContext) -> str | None:
    return _ONLY_POOLED if _only_pooled(context) and not context["is_embedding"] else None


def _scores(context: ResolutionContext) -> bool | None:
    return True if context["score_template"] is not None and _only_pooled(context) is None else None


def _template_needs_text(context: ResolutionContext) -> str | None:
    if context["score_template"] is None or not _only_pooled(context):
        return None
    return "the model generates no text that could answer yes or no"


def _pooling_supported(context: ResolutionContext) -> str | None:
    model = context.model
    if not context["is_embedding"] or model is None or model.pooling is None or model.pooling in _SUPPORTED:
        return None
    return f"1_Pooling/config.json of {model.path} asks for {model.pooling} pooling, which is not implemented"


def _modules_supported(context: ResolutionContext) -> str | None:
    model = context.model
    if not context["is_embedding"] or model is None or not model.head.unsupported or model.head.missing:
        return None
    return f"modules.json of {model.path} asks for what srv does not compute: {model.head.unsupported}"


def _modules_there(context: ResolutionContext) -> str | None:
    model = context.model
    if not context["is_embedding"] or model is None or not model.head.missing:
        return None
    return f"modules.json of {model.path} asks for {model.head.missing}, which is not in its folder"


def _head_pooling(context: ResolutionContext) -> str | None:
    model = context.model
    if model is None or not model.head.labels or model.pooling in (None, context["pooling"]):
        return None
    return f"the classification head of {model.name} reads hidden states that are pooled as {model.pooling}"


def _drafts(context: ResolutionContext) -> str | None:
    model = context.model
    if context["speculative_algorithm"] is None or model is None or model.generates:
        return None
    return f"{model.name} generates no text that could be drafted"


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default("pooling", _pooling, "the model's files name it (1_Pooling/config.json, or its architecture)"),
    Default("is_embedding", _only_pooled, _ONLY_POOLED),
    Default(
        "is_embedding", _scores, "score_template is for endpoints of pooled hidden states", reads=("score_template",)
    ),
    Default("disable_graphs", _only_pooled, "captured steps generate tokens, which the model does not"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("is_embedding", "excluded", _nothing_to_serve, "Leave it out."),
    Constraint(
        "is_embedding",
        "pooling_not_supported",
        _pooling_supported,
        f"Serve a model that was trained with one of the poolings {', '.join(sorted(_SUPPORTED))}.",
    ),
    Constraint(
        "is_embedding",
        "modules_not_supported",
        _modules_supported,
        "Serve a model whose modules are a transformer, pooling, dense layers and a norm.",
    ),
    Constraint("is_embedding", "module_missing", _modules_there, "Download that file of the model as well."),
    Constraint("pooling", "pooling_of_head", _head_pooling, "Leave --pooling out."),
    Constraint("score_template", "no_text_to_score", _template_needs_text, "Leave --score-template out."),
    Constraint("speculative_algorithm", "no_text_to_draft", _drafts, "Leave --speculative-algorithm out."),
)
