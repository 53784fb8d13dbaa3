"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without token types, with other names for most sizes.

Positions that were sinusoidal are stored like learned ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.bert import bert_tree, positions, unused
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS
from srv.models.families.builders.layer_norm import activation

_FIELDS: dict[str, tuple[str, Any]] = {  # of BERT: their names here, and defaults
    "hidden_size": ("dim", 768),
    "num_hidden_layers": ("n_layers", 6),
    "num_attention_heads": ("n_heads", 12),
    "intermediate_size": ("hidden_dim", 3072),
    "hidden_act": ("activation", "gelu"),
}
_DEFAULTS: dict[str, Any] = {
    **dict(_FIELDS.values()),
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_NORM_EPS = 1e-12  # no field states it


def tree(config: Mapping[str, Any]) -> Encoder:
    activation(config, "activation")  # refuses one under the name that the field has here
    found = {**config, **{name: config[own] for name, (own, _) in _FIELDS.items()}}
    found |= {"layer_norm_eps": _NORM_EPS, "type_vocab_size": 0}
    return bert_tree(found, positions(config), 0)


_LAYER = "transformer.layer.*"
_NAMES: dict[str, str] = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.LayerNorm": "model.embed_norm",
    **{f"{_LAYER}.attention.{each}_lin": f"model.layers.*.self_attn.{each}_proj" for each in "qkv"},
    f"{_LAYER}.attention.out_lin": "model.layers.*.self_attn.o_proj",
    f"{_LAYER}.sa_layer_norm": "model.layers.*.attention_norm",
    f"{_LAYER}.ffn.lin1": "model.layers.*.mlp.up_proj",
    f"{_LAYER}.ffn.lin2": "model.layers.*.mlp.down_proj",
    f"{_LAYER}.output_layer_norm": "model.layers.*.mlp_norm",
}
_PREFIX = "distilbert."
_MASKED_HEAD = tuple(
    f"vocab_{name}.{each}" for name in ("transform", "layer_norm", "projector") for each in ("weight", "bias")
)
ARCHITECTURE = Architecture(
    name="DistilBertModel",
    tree=tree,
    pooled=encoders.mean_pooled(positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="distilbert",
    weights=(Rename(prefix=_PREFIX, names=_NAMES), Skip(unused(_PREFIX, *_MASKED_HEAD))),
)
MASKED = ARCHITECTURE._replace(name="DistilBertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    name="DistilBertForSequenceClassification",
    tree=encoders.classifier_of(tree, "relu"),
    pooled=encoders.cls_pooled(positions),
    model_type=None,
    weights=(
        Rename(prefix=_PREFIX, names={**_NAMES, "pre_classifier": "head.dense", "classifier": "score"}),
        Skip(unused(_PREFIX)),
    ),
)
