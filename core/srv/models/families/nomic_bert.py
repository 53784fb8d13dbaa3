"""Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rotary positions and gated MLPs, and no biases.

Published configurations have the names of GPT-2 for their fields, those that transformers saves its own. Rotary
embeddings that change with the length of a text do so beyond the trained positions, up to which texts are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.gguf_layout import BOTH_WAYS, ENCODER_FIELDS, ENCODER_NAMES, GGUFLayout
from srv.models.checkpoints.rules import QKV, Rename, Skip, Split
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

# Fields that configurations may state by either name have no defaults here.
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "type_vocab_size": 2, "pad_token_id": 0}
_FIELDS: dict[str, tuple[str, Any]] = {  # their older names, and defaults
    "hidden_size": ("n_embd", None),
    "num_hidden_layers": ("n_layer", None),
    "num_attention_heads": ("n_head", None),
    "intermediate_size": ("n_inner", None),
    "max_position_embeddings": ("n_positions", None),
    "layer_norm_eps": ("layer_norm_epsilon", 1e-12),
    "rope_theta": ("rotary_emb_base", 1000.0),
}
_TRAINED = "max_trained_positions"
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "moe_every_n_layers": (0,),  # the first, because those of the models with experts differ in others too
    "activation_function": ("swiglu",),
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False,),
}


def tree(config: Mapping[str, Any]) -> Encoder:
    refuse_unless(config, _SUPPORTED)
    fields = _renamed(config)
    activation, sizes = encoders.gated(config, "hidden_act"), rotary_sizes(fields)
    return encoders.encoder(
        sizes,
        encoders.attention(sizes, bias=False),
        encoders.mlp(sizes, activation, bias=False, down_bias=False),
        encoders.layer_norm(sizes),
        types=int(config["type_vocab_size"]),
    )


def positions(config: Mapping[str, Any]) -> int:
    usable = rotary_positions(_renamed(config))
    return min(usable, int(config.get(_TRAINED) or usable))


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of fields that transformers saves, in place of older ones."""
    found = dict(config)
    for name, (older, default) in _FIELDS.items():
        if config.get(name) is None:
            found[name] = config[older] if default is None else config.get(older, default)
    return found


_ENCODER: dict[str, str] = {
    **NAMES,
    **GATED_NAMES,
    "emb_ln": "model.embed_norm",
    "encoder.layers.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
    "encoder.layers.*.attn.out_proj": "model.layers.*.self_attn.o_proj",
    "encoder.layers.*.norm1": "model.layers.*.attention_norm",
    "encoder.layers.*.mlp.fc11": "model.layers.*.mlp.up_proj",
    "encoder.layers.*.mlp.fc12": "model.layers.*.mlp.gate_proj",
    "encoder.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
    "encoder.layers.*.norm2": "model.layers.*.mlp_norm",
}
_PREFIXES = ("", "nomic_bert.", "bert.")  # none, that of transformers, and the published one of whole models
_PREDICTIONS = ("decoder", "transform.dense", "transform.layer_norm")
_MASKED_HEAD = (
    "cls.predictions.bias",
    *(f"cls.predictions.{name}.{each}" for name in _PREDICTIONS for each in ("weight", "bias")),
)
ARCHITECTURE = Architecture(
    name="NomicBertModel",
    tree=tree,
    gguf=GGUFLayout(
        "nomic-bert",
        weights=ENCODER_NAMES,
        fields=ENCODER_FIELDS,
        implied=BOTH_WAYS,
        sizes={"type_vocab_size": ("token_types.weight", 0)},
    ),
    pooled=encoders.mean_pooled(positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="nomic_bert",
    weights=(
        Rename(with_prefixes(_PREFIXES, _ENCODER)),
        Skip((*_MASKED_HEAD, *(f"{prefix}{name}" for prefix in _PREFIXES for name in POOLER))),
        Split("self_attn.qkv_proj", QKV),
    ),
)
MASKED = ARCHITECTURE._replace(gguf=None, name="NomicBertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    gguf=None,
    name="NomicBertForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(positions),
    model_type=None,
    weights=(
        Rename({**with_prefixes(_PREFIXES, {**_ENCODER, "pooler.dense": "head.dense"}), "classifier": "score"}),
        Split("self_attn.qkv_proj", QKV),
    ),
)
