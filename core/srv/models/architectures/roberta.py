"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after that of padding, with another head.

The padding token has a position of its own in transformers. Here it counts like any other: texts do not contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.bert import DEFAULTS, NAMES, OLD_SUFFIXES, bert_sizes, unused
from srv.models.architectures.encoder_config import LAYERS, EncoderSizes, HeadConfig, encoder_of, label_count
from srv.models.checkpoints.rules import Rename, Skip

_DEFAULTS: dict[str, Any] = {**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
_PREFIX = "roberta."
_HEADS = (
    "pooler.dense.weight",
    "pooler.dense.bias",
    "lm_head.bias",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
    "lm_head.decoder.weight",
    "lm_head.decoder.bias",
)


def sizes(config: Mapping[str, Any]) -> EncoderSizes:
    first = int(config["pad_token_id"]) + 1
    return bert_sizes(config, int(config["max_position_embeddings"]) - first, first)


def _classifier(config: Mapping[str, Any]) -> EncoderSizes:
    return sizes(config)._replace(head=HeadConfig(label_count(config)), pooled_by="cls")


ROBERTA = Architecture(
    name="RobertaModel",
    make_config=encoder_of(sizes),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="roberta",
    weights=(Rename(prefix=_PREFIX, names=NAMES, suffixes=OLD_SUFFIXES), Skip(unused(_PREFIX, *_HEADS))),
)
ROBERTA_MASKED = ROBERTA._replace(name="RobertaForMaskedLM", model_type=None)
ROBERTA_CLASSIFIER = ROBERTA._replace(
    name="RobertaForSequenceClassification",
    make_config=encoder_of(_classifier),
    model_type=None,
    weights=(
        Rename(
            prefix=_PREFIX,
            names={**NAMES, "classifier.dense": "head.dense", "classifier.out_proj": "score"},
            suffixes=OLD_SUFFIXES,
        ),
        Skip(unused(_PREFIX, "pooler.dense.weight", "pooler.dense.bias")),
    ),
)
_XLM_DEFAULTS: dict[str, Any] = {**_DEFAULTS, "vocab_size": 30522}
XLM_ROBERTA = ROBERTA._replace(name="XLMRobertaModel", model_type="xlm-roberta", defaults=_XLM_DEFAULTS)
XLM_ROBERTA_MASKED = ROBERTA_MASKED._replace(name="XLMRobertaForMaskedLM", defaults=_XLM_DEFAULTS)
XLM_ROBERTA_CLASSIFIER = ROBERTA_CLASSIFIER._replace(name="XLMRobertaForSequenceClassification", defaults=_XLM_DEFAULTS)
