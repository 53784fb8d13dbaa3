"""Decoders without an output layer: alone (`*Model`), or with a linear layer that reads the state of the last token
(`*ForSequenceClassification`).

Torch-free. The decoder is that of the class with an output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from srv.models import derive
from srv.models.blueprint import Decoder, Output, Part
from srv.models.families import gemma3, llama, mistral, qwen2, qwen3
from srv.models.families.architecture import Architecture, Pooled
from srv.models.families.builders.encoders import label_count

_CLASSIFIER, _ALONE = "ForSequenceClassification", "Model"


def _of(
    base: Architecture, suffix: str, stem: str | None = None, whole: Callable[[Mapping[str, Any]], Part] | None = None
) -> Architecture:
    """`stem`: of the name; None for that of `base`. `whole(config)`: with an output layer; None for `base.tree`."""

    def labels(config: Mapping[str, Any]) -> int:
        return label_count(config) if suffix == _CLASSIFIER else 0

    def tree(config: Mapping[str, Any]) -> Part:
        """With the head, which every rank has, in place of the output layer."""
        decoder, count = (whole or base.tree)(config), labels(config)
        assert isinstance(decoder, Decoder)
        head = Output({"score": count}, derive.stack(decoder).embedding.size) if count else None
        return replace(decoder, output=None, head=head)

    return Architecture(
        name=(stem or base.name.removesuffix("ForCausalLM")) + suffix,
        tree=tree,
        defaults=base.defaults,
        weights=base.weights,
        pooled=lambda config: _pooled(config, labels(config)),
    )


def _pooled(config: Mapping[str, Any], labels: int) -> Pooled:
    """All tokens of a prompt that attend to later ones are rows of one step, and have positions of the model."""
    if config.get("use_bidirectional_attention") is True:
        return Pooled(int(config["max_position_embeddings"]), labels, "last" if labels else "mean")
    return Pooled(None, labels, "last")


LLAMA, LLAMA_CLASSIFIER = (_of(llama.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
MISTRAL, MISTRAL_CLASSIFIER = (_of(mistral.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN2, QWEN2_CLASSIFIER = (_of(qwen2.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN3, QWEN3_CLASSIFIER = (_of(qwen3.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
GEMMA3, GEMMA3_CLASSIFIER = (
    _of(gemma3.ARCHITECTURE, suffix, "Gemma3Text", gemma3.text_model) for suffix in (_ALONE, _CLASSIFIER)
)
