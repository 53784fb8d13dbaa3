"""Rules for embeddings: the pooling that the checkpoint was trained with."""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, ResolutionContext
from srv.types import Pooling

_SUPPORTED = frozenset(Pooling)


def _pooling(context: ResolutionContext) -> str | None:
    model = context.model
    return model.pooling if model is not None and model.pooling in _SUPPORTED else None


def _pooling_supported(context: ResolutionContext) -> str | None:
    model = context.model
    if not context["is_embedding"] or model is None or model.pooling is None or model.pooling in _SUPPORTED:
        return None
    return f"1_Pooling/config.json of {model.path} asks for {model.pooling} pooling, which is not implemented"


MODEL_DEFAULTS: tuple[Default, ...] = (Default("pooling", _pooling, "1_Pooling/config.json of the model names it"),)
CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "is_embedding",
        "pooling_not_supported",
        _pooling_supported,
        "Serve a model that was trained with pooling of the last token or of the mean.",
    ),
)
