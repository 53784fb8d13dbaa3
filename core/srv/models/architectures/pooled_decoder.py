"""Decoders without an output layer: alone (`*Model`), or with a linear layer that reads the state of the last token
(`*ForSequenceClassification`).

Torch-free. The decoder is that of the class with an output layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.architectures import llama, mistral, qwen2, qwen3
from srv.models.architectures.architecture import Architecture, DividedSizes, NativeConfig
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.encoder_config import label_count
from srv.models.architectures.op_uses import OUTPUT
from srv.models.derive import Matrix, ModelOps
from srv.models.layers.rope_config import UnsupportedConfig
from srv.specs import AttentionLayer

LAYERS = "srv.models.architectures.pooled_decoder_layers:PooledDecoder"
_CLASSIFIER, _ALONE = "ForSequenceClassification", "Model"


class PooledDecoderConfig(NamedTuple):
    """`decoder`: with tied embeddings, so that it has no weights for the output layer. `labels`: see `PooledConfig`."""

    decoder: DecoderConfig
    labels: int

    @property
    def positions(self) -> int | None:
        return None

    @property
    def pooled_by(self) -> str:
        return "last"

    @property
    def parameters(self) -> int:
        return self.decoder.parameters + self.labels * self.decoder.hidden_size

    @property
    def projection_params(self) -> int:
        return self.decoder.projection_params

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self.decoder.attention_layers

    @property
    def divided(self) -> DividedSizes | None:
        return self.decoder.divided

    def of_rank(self, ranks: int) -> PooledDecoderConfig:
        return self._replace(decoder=self.decoder.of_rank(ranks))

    def model_ops(self, dtype: str) -> ModelOps:
        found = self.decoder.model_ops(dtype)
        kept = tuple(each for each in found.matrices if each.names != (OUTPUT,))
        head = (Matrix(("score",), self.decoder.hidden_size, self.labels),) if self.labels else ()
        return found._replace(matrices=(*kept, *head))


def _of(base: Architecture, suffix: str) -> Architecture:
    def make_config(config: Mapping[str, Any]) -> NativeConfig:
        decoder = base.make_config(config)
        if not isinstance(decoder, DecoderConfig):
            raise UnsupportedConfig(f"{base.name} is served with its output layer only")
        labels = label_count(config) if suffix == _CLASSIFIER else 0
        return PooledDecoderConfig(decoder._replace(tied_embeddings=True), labels)

    return Architecture(
        name=base.name.removesuffix("ForCausalLM") + suffix,
        make_config=make_config,
        defaults=base.defaults,
        layers=LAYERS,
        weights=base.weights,
    )


LLAMA, LLAMA_CLASSIFIER = (_of(llama.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
MISTRAL, MISTRAL_CLASSIFIER = (_of(mistral.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN2, QWEN2_CLASSIFIER = (_of(qwen2.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
QWEN3, QWEN3_CLASSIFIER = (_of(qwen3.ARCHITECTURE, suffix) for suffix in (_ALONE, _CLASSIFIER))
