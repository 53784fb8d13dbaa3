"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT without kinds of tokens, with biases of attention by distance.

Positions begin after that of padding, whose number is 1 in this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder, RelativeBias
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.bert import NAMES, unused
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS, MASKED_HEAD, POOLER
from srv.models.families.builders.layer_norm import activation
from srv.models.unsupported import UnsupportedConfig, refuse_unless

FIRST_POSITION = 2
BUCKETS = 32  # of which transformers makes use, whatever the field says


def tree(config: Mapping[str, Any]) -> Encoder:
    refuse_unless(config, {"relative_attention_num_buckets": (BUCKETS,)})
    heads, head_dim = encoders.head_sizes(config)
    if positions(config) < 1:
        raise UnsupportedConfig(f"max_position_embeddings = {config['max_position_embeddings']} leaves no position")
    sizes = encoders.encoder_sizes(config, heads, head_dim, float(config["layer_norm_eps"]))
    return encoders.encoder(
        sizes,
        encoders.attention(sizes, relative_bias=True),
        encoders.mlp(sizes, activation(config, "hidden_act")),
        encoders.layer_norm(sizes),
        positions=positions(config) + FIRST_POSITION,
        first_position=FIRST_POSITION,
        bias=RelativeBias(BUCKETS, heads, name="relative_attention_bias"),
    )


def positions(config: Mapping[str, Any]) -> int:
    return int(config["max_position_embeddings"]) - FIRST_POSITION


_PREFIX = "mpnet."
_OWN = {
    **{f"encoder.layer.*.attention.attn.{each}": f"model.layers.*.self_attn.{each}_proj" for each in "qkvo"},
    "encoder.layer.*.attention.LayerNorm": "model.layers.*.attention_norm",
    "encoder.relative_attention_bias": "model.relative_attention_bias",
}
_NAMES = {**{stored: name for stored, name in NAMES.items() if ".attention." not in stored}, **_OWN}
ARCHITECTURE = Architecture(
    name="MPNetModel",
    tree=tree,
    pooled=encoders.mean_pooled(positions),
    defaults={
        "vocab_size": 30527,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "relative_attention_num_buckets": BUCKETS,
        "pad_token_id": 1,
    },
    layers=LAYERS,
    model_type="mpnet",
    types_after_padding=("mpnet",),
    weights=(Rename(prefix=_PREFIX, names=_NAMES), Skip(unused(_PREFIX, *POOLER, *MASKED_HEAD))),
)
MASKED = ARCHITECTURE._replace(name="MPNetForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    name="MPNetForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(positions),
    model_type=None,
    weights=(
        Rename(prefix=_PREFIX, names={**_NAMES, "classifier.dense": "head.dense", "classifier.out_proj": "score"}),
        Skip(unused(_PREFIX, *POOLER)),
    ),
)
