"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after that of padding, with another head.

The padding token has a position of its own in transformers. Here it counts like any other: texts do not contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.bert import DEFAULTS, NAMES, OLD_SUFFIXES, bert_tree, unused
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS, MASKED_HEAD, POOLER

_DEFAULTS: dict[str, Any] = {**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
_PREFIX = "roberta."


def tree(config: Mapping[str, Any]) -> Encoder:
    return bert_tree(config, positions(config), _first_position(config))


def positions(config: Mapping[str, Any]) -> int:
    return int(config["max_position_embeddings"]) - _first_position(config)


def _first_position(config: Mapping[str, Any]) -> int:
    return int(config["pad_token_id"]) + 1


# Also those of classes that only transformers has.
_TYPES_AFTER_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
ROBERTA = Architecture(
    name="RobertaModel",
    tree=tree,
    pooled=encoders.mean_pooled(positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    types_after_padding=_TYPES_AFTER_PADDING,
    model_type="roberta",
    weights=(Rename(prefix=_PREFIX, names=NAMES, suffixes=OLD_SUFFIXES), Skip(unused(_PREFIX, *POOLER, *MASKED_HEAD))),
)
ROBERTA_MASKED = ROBERTA._replace(name="RobertaForMaskedLM", model_type=None)
ROBERTA_CLASSIFIER = ROBERTA._replace(
    name="RobertaForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(positions),
    model_type=None,
    weights=(
        Rename(
            prefix=_PREFIX,
            names={**NAMES, "classifier.dense": "head.dense", "classifier.out_proj": "score"},
            suffixes=OLD_SUFFIXES,
        ),
        Skip(unused(_PREFIX, *POOLER)),
    ),
)
_XLM_DEFAULTS: dict[str, Any] = {**_DEFAULTS, "vocab_size": 30522}
XLM_ROBERTA = ROBERTA._replace(name="XLMRobertaModel", model_type="xlm-roberta", defaults=_XLM_DEFAULTS)
XLM_ROBERTA_MASKED = ROBERTA_MASKED._replace(name="XLMRobertaForMaskedLM", defaults=_XLM_DEFAULTS)
XLM_ROBERTA_CLASSIFIER = ROBERTA_CLASSIFIER._replace(name="XLMRobertaForSequenceClassification", defaults=_XLM_DEFAULTS)
