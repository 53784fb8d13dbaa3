"""Decoders without an output layer: alone (`*Model`), or with a linear layer that reads the state of the last token
(`*ForSequenceClassification`).

Torch-free. The decoder is that of the class with an output layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.architectures import llama, mistral, qwen2, qwen3
from srv.models.architectures.architecture import Architecture, NativeConfig, Pooled
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.described import Described
from srv.models.architectures.encoder_config import label_count
from srv.models.blueprint import Output, Part
from srv.models.layers.rope_config import UnsupportedConfig

_CLASSIFIER, _ALONE = "ForSequenceClassification", "Model"


@dataclass(frozen=True)
class PooledDecoderConfig(Described):
    """`decoder`: with tied embeddings, so that it has no weights for the output layer."""

    decoder: DecoderConfig
    pooled: Pooled | None = None

    @functools.cached_property
    def tree(self) -> Part:
        """With the head, which every rank has, in place of the output layer."""
        labels = 0 if self.pooled is None else self.pooled.labels
        head = Output({"score": labels}, self.decoder.hidden_size) if labels else None
        return dataclasses.replace(self.decoder.tree, output=None, head=head)


def _of(base: Architecture, suffix: str) -> Architecture:
    def make_config(config: Mapping[str, Any]) -> NativeConfig:
        decoder = base.make_config(config)
        if not isinstance(decoder, DecoderConfig):
            raise UnsupportedConfig(f"{base.name} is served with its output layer only")
        labels = label_count(config) if suffix == _CLASSIFIER else 0
        return PooledDecoderConfig(decoder.replace(tied_embeddings=True), Pooled(None, labels, "last"))

    return Architecture(
        name=base.name.removesuffix("ForCausalLM") + suffix,
        make_config=make_config,
        defaults=base.defaults,
        weights=base.weights,
    )


LLAMA, LLAMA_CLASSIFIER = (_of(llama.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
MISTRAL, MISTRAL_CLASSIFIER = (_of(mistral.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN2, QWEN2_CLASSIFIER = (_of(qwen2.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN3, QWEN3_CLASSIFIER = (_of(qwen3.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
