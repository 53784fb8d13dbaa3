"""GTE (Zhang et al. 2024, arXiv:2407.19669): BERT with rotary positions and gated MLPs.

Checkpoints have queries, keys and values in one matrix, and the up projection with the gate after it; those that
transformers makes of its own layers have each in a matrix of its own. Both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.rules import GATE_UP, QKV, Permute, Rename, Skip, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS, POOLER
from srv.models.families.builders.rotary_encoders import (
    GATED_NAMES,
    NAMES,
    rotary_positions,
    rotary_sizes,
    with_prefixes,
)
from srv.models.unsupported import refuse_unless

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 250048,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
    "rope_theta": 160_000.0,
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "layer_norm_type": ("layer_norm",),
    "logn_attention_scale": (False,),
    "position_embedding_type": ("rope",),
}


def tree(config: Mapping[str, Any]) -> Encoder:
    refuse_unless(config, _SUPPORTED)
    activation, sizes = encoders.gated(config, "hidden_act"), rotary_sizes(_with_scaling(config))
    return encoders.encoder(
        sizes,
        encoders.attention(sizes),
        encoders.mlp(sizes, activation, bias=False),
        encoders.layer_norm(sizes),
        types=int(config["type_vocab_size"]),
    )


def _with_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The published implementation calls a fixed scaling "ntk" (Su 2023): the base times a factor, and frequencies
    divided by its power 2 / dim, whatever the length of a text is.
    """
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") != "ntk":
        return config
    refuse_unless(scaling, {"mixed_b": ()}, "rope_scaling.")
    factor, (_, dim) = float(scaling["factor"]), encoders.head_sizes(config, stated=True)
    divided = {"rope_type": "linear", "factor": factor ** (2 / dim)}
    return {**config, "rope_theta": float(config["rope_theta"]) * factor, "rope_scaling": divided}


_ENCODER: dict[str, str] = {
    **NAMES,
    **GATED_NAMES,
    "encoder.layer.*.attention.qkv_proj": "model.layers.*.self_attn.qkv_proj",
    "encoder.layer.*.attention.o_proj": "model.layers.*.self_attn.o_proj",
    "encoder.layer.*.attn_ln": "model.layers.*.attention_norm",
    "encoder.layer.*.mlp.up_gate_proj": "model.layers.*.mlp.up_gate_proj",
    "encoder.layer.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "encoder.layer.*.mlp_ln": "model.layers.*.mlp_norm",
}
_OTHER_HEADS = (
    "classifier.weight",
    "classifier.bias",
    *(f"lm_head.{name}.{each}" for name in ("decoder", "dense", "norm", "layer_norm") for each in ("weight", "bias")),
)
_PREFIXES = ("", "gte.", "new.")  # none, that of transformers, and the published one


ARCHITECTURE = Architecture(
    name="GteModel",
    tree=tree,
    pooled=encoders.mean_pooled(rotary_positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="gte",
    published_names=("NewModel",),
    weights=(
        Rename(with_prefixes(_PREFIXES, _ENCODER)),
        Skip(tuple(f"{prefix}{name}" for prefix in _PREFIXES for name in (*POOLER, *_OTHER_HEADS))),
        Split("self_attn.qkv_proj", QKV),
        Split("mlp.up_gate_proj", GATE_UP),
        Permute("mlp.up_gate_proj", "swapped_halves"),
    ),
)
MASKED = ARCHITECTURE._replace(name="GteForMaskedLM", model_type=None, published_names=("NewForMaskedLM",))
CLASSIFIER = ARCHITECTURE._replace(
    name="GteForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(rotary_positions),
    model_type=None,
    published_names=("NewForSequenceClassification",),
    weights=(
        Rename({**with_prefixes(_PREFIXES, {**_ENCODER, "pooler.dense": "head.dense"}), "classifier": "score"}),
        Split("self_attn.qkv_proj", QKV),
        Split("mlp.up_gate_proj", GATE_UP),
        Permute("mlp.up_gate_proj", "swapped_halves"),
    ),
)
