"""Jina embeddings v3 (Sturua et al. 2024, arXiv:2409.10173): XLM-RoBERTa with rotary positions.

Its model without an adapter is served, which is what transformers computes by itself. The adapters of tasks are LoRA
weights in folders of their own or, in the files as published, beside the matrix that each of them changes. They are not
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.gguf_layout import BOTH_WAYS, ENCODER_FIELDS, ENCODER_NAMES, GGUFLayout
from srv.models.checkpoints.rules import QKV, Rename, Skip, Split
from srv.models.families.architecture import Architecture
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS, MASKED_HEAD
from srv.models.families.builders.layer_norm import activation
from srv.models.families.builders.rotary_encoders import NAMES, rotary_positions, rotary_sizes
from srv.models.unsupported import refuse_unless

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "rope_theta": 20_000.0,
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {"is_decoder": (False,), "position_embedding_type": ("rotary",)}


def tree(config: Mapping[str, Any]) -> Encoder:
    refuse_unless(config, _SUPPORTED)
    of_mlp, sizes = activation(config, "hidden_act"), rotary_sizes(config)
    return encoders.encoder(
        sizes,
        encoders.attention(sizes),
        encoders.mlp(sizes, of_mlp),
        encoders.layer_norm(sizes),
        types=int(config["type_vocab_size"]),
    )


_ENCODER: dict[str, str] = {
    **NAMES,
    "layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
    "emb_ln": "model.embed_norm",
    "encoder.layers.*.mixer.Wqkv": "model.layers.*.self_attn.qkv_proj",
    "encoder.layers.*.mixer.out_proj": "model.layers.*.self_attn.o_proj",
    "encoder.layers.*.norm1": "model.layers.*.attention_norm",
    "encoder.layers.*.mlp.fc1": "model.layers.*.mlp.up_proj",
    "encoder.layers.*.mlp.fc2": "model.layers.*.mlp.down_proj",
    "encoder.layers.*.norm2": "model.layers.*.mlp_norm",
}
# The modules whose matrices have adapters beside them as published.
_ADAPTED = (
    *("embeddings.word_embeddings", "embeddings.token_type_embeddings", "pooler.dense"),
    *(f"encoder.layers.*.{each}" for each in ("mixer.Wqkv", "mixer.out_proj", "mlp.fc1", "mlp.fc2")),
)
_ORIGINAL = "parametrizations.weight.original"
_ENCODER |= {f"{each}.{_ORIGINAL}": f"{_ENCODER[each]}.weight" for each in _ADAPTED if each in _ENCODER}
_PREFIX = "roberta."
_ADAPTERS = tuple(
    f"{_PREFIX}{each}.parametrizations.weight.{'0' if '*' in each else '*'}.lora_{side}"
    for each in _ADAPTED
    for side in "AB"
)
_POOLER = tuple(f"{prefix}pooler.dense.{each}" for prefix in ("", _PREFIX) for each in ("weight", "bias", _ORIGINAL))
ARCHITECTURE = Architecture(
    name="JinaEmbeddingsV3Model",
    tree=tree,
    gguf=GGUFLayout(
        "jina-bert-v3",
        weights=ENCODER_NAMES,
        fields=ENCODER_FIELDS,
        implied=BOTH_WAYS,
        sizes={"type_vocab_size": ("token_types.weight", 0)},
        constants={"hidden_act": "gelu"},
    ),
    pooled=encoders.mean_pooled(rotary_positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="jina_embeddings_v3",
    names={"rotary_emb_base": "rope_theta"},
    weights=(
        Rename(prefix=_PREFIX, names=_ENCODER),
        Skip((*_POOLER, *MASKED_HEAD, *_ADAPTERS)),
        Split("self_attn.qkv_proj", QKV),
    ),
)
MASKED = ARCHITECTURE._replace(gguf=None, name="JinaEmbeddingsV3ForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    gguf=None,
    name="JinaEmbeddingsV3ForSequenceClassification",
    tree=encoders.classifier_of(tree),
    pooled=encoders.cls_pooled(rotary_positions),
    model_type=None,
    weights=(
        Rename(prefix=_PREFIX, names={**_ENCODER, "classifier.dense": "head.dense", "classifier.out_proj": "score"}),
        Skip(_POOLER),
        Split("self_attn.qkv_proj", QKV),
    ),
)
