"""Decoders without an output layer: alone (`*Model`), or with a linear layer that reads the state of the last token
(`*ForSequenceClassification`).

Torch-free. The decoder is that of the class with an output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models import derive
from srv.models.blueprint import Decoder, Output, Part
from srv.models.families import llama, mistral, qwen2, qwen3
from srv.models.families.architecture import Architecture, Pooled
from srv.models.families.builders.encoders import label_count

_CLASSIFIER, _ALONE = "ForSequenceClassification", "Model"


def _of(base: Architecture, suffix: str) -> Architecture:
    def labels(config: Mapping[str, Any]) -> int:
        return label_count(config) if suffix == _CLASSIFIER else 0

    def tree(config: Mapping[str, Any]) -> Part:
        """With the head, which every rank has, in place of the output layer."""
        decoder, count = base.tree(config), labels(config)
        assert isinstance(decoder, Decoder)
        head = Output({"score": count}, derive.stack(decoder).embedding.size) if count else None
        return replace(decoder, output=None, head=head)

    return Architecture(
        name=base.name.removesuffix("ForCausalLM") + suffix,
        tree=tree,
        defaults=base.defaults,
        weights=base.weights,
        pooled=lambda config: Pooled(None, labels(config), "last"),
    )


LLAMA, LLAMA_CLASSIFIER = (_of(llama.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
MISTRAL, MISTRAL_CLASSIFIER = (_of(mistral.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN2, QWEN2_CLASSIFIER = (_of(qwen2.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN3, QWEN3_CLASSIFIER = (_of(qwen3.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
