"""BERT: positions and kinds of tokens are added to the embeddings, and norms follow the additions to the residual.

Whole models, those for masked tokens, of which the encoder is served, and those with a classification head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.gguf_layout import BOTH_WAYS, ENCODER_FIELDS, ENCODER_NAMES, GGUFLayout
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS, POOLER
from srv.models.families.builders.layer_norm import activation
from srv.models.unsupported import UnsupportedConfig, refuse_unless

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
}
_LAYER = "encoder.layer.*"
NAMES: dict[str, str] = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    f"{_LAYER}.attention.self.query": "model.layers.*.self_attn.q_proj",
    f"{_LAYER}.attention.self.key": "model.layers.*.self_attn.k_proj",
    f"{_LAYER}.attention.self.value": "model.layers.*.self_attn.v_proj",
    f"{_LAYER}.attention.output.dense": "model.layers.*.self_attn.o_proj",
    f"{_LAYER}.attention.output.LayerNorm": "model.layers.*.attention_norm",
    f"{_LAYER}.intermediate.dense": "model.layers.*.mlp.up_proj",
    f"{_LAYER}.output.dense": "model.layers.*.mlp.down_proj",
    f"{_LAYER}.output.LayerNorm": "model.layers.*.mlp_norm",
}
OLD_SUFFIXES = {"gamma": "weight", "beta": "bias"}  # of checkpoints that were converted from TensorFlow
_MASKED_HEAD = (
    "cls.predictions.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma",
    "cls.predictions.transform.LayerNorm.beta",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)


def bert_tree(config: Mapping[str, Any], positions: int, first: int) -> Encoder:
    """From BERT's fields. positions: the most tokens; first: the row of the first position.

    Raises UnsupportedConfig with what is not implemented.
    """
    refuse_unless(config, _SUPPORTED)
    heads, head_dim = encoders.head_sizes(config)
    if positions < 1:
        raise UnsupportedConfig(f"max_position_embeddings = {config['max_position_embeddings']} leaves no position")
    sizes = encoders.encoder_sizes(config, heads, head_dim, float(config["layer_norm_eps"]))
    return encoders.encoder(
        sizes,
        encoders.attention(sizes),
        encoders.mlp(sizes, activation(config, "hidden_act")),
        encoders.layer_norm(sizes),
        positions=positions + first,
        first_position=first,
        types=int(config["type_vocab_size"]),
    )


def tree(config: Mapping[str, Any]) -> Encoder:
    return bert_tree(config, positions(config), 0)


def positions(config: Mapping[str, Any]) -> int:
    return int(config["max_position_embeddings"])


def unused(prefix: str, *names: str) -> tuple[str, ...]:
    """Stored tensors that no layer needs, in checkpoints with and without the prefix of the encoder."""
    both = ("embeddings.position_ids", "embeddings.token_type_ids", *names)
    return tuple(f"{start}{name}" for start in ("", prefix) for name in both)


_PREFIX = "bert."
ENCODER_WEIGHTS = (
    Rename(prefix=_PREFIX, names=NAMES, suffixes=OLD_SUFFIXES),
    Skip(unused(_PREFIX, *POOLER, *_MASKED_HEAD)),
)
ARCHITECTURE = Architecture(
    name="BertModel",
    tree=tree,
    gguf=GGUFLayout(
        "bert",
        weights=ENCODER_NAMES,
        fields=ENCODER_FIELDS,
        implied=BOTH_WAYS,
        sizes={
            "max_position_embeddings": ("position_embd.weight", 0),
            "type_vocab_size": ("token_types.weight", 0),
        },
        constants={"hidden_act": "gelu"},
    ),
    pooled=encoders.mean_pooled(positions),
    defaults=DEFAULTS,
    layers=LAYERS,
    model_type="bert",
    weights=ENCODER_WEIGHTS,
)
MASKED = ARCHITECTURE._replace(gguf=None, name="BertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    gguf=None,
    name="BertForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(positions),
    model_type=None,
    weights=(
        Rename(
            prefix=_PREFIX, names={**NAMES, "pooler.dense": "head.dense", "classifier": "score"}, suffixes=OLD_SUFFIXES
        ),
        Skip(unused(_PREFIX)),
    ),
)
