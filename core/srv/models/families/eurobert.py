"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): the layers of Llama with attention in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Norm
from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture, Pooled
from srv.models.families.builders import encoders
from srv.models.families.builders.encoders import LAYERS
from srv.models.families.builders.rotary_encoders import GATED_NAMES, rotary_positions, rotary_sizes
from srv.models.unsupported import UnsupportedConfig

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_pooling": "late",
    "pad_token_id": 128001,
    "eos_token_id": 128001,
}
_POOLINGS = {"bos": "cls", "mean": "mean"}


def tree(config: Mapping[str, Any]) -> Encoder:
    fields = {**config, "layer_norm_eps": config["rms_norm_eps"]}
    activation, sizes = encoders.gated(config, "hidden_act"), rotary_sizes(fields)
    kv_heads = int(config["num_key_value_heads"])
    if sizes.heads % kv_heads:
        raise UnsupportedConfig(f"{sizes.heads} heads cannot share {kv_heads} key heads")
    sizes, bias = sizes._replace(kv_heads=kv_heads), bool(config["mlp_bias"])
    return encoders.encoder(
        sizes,
        encoders.attention(sizes, bias=bool(config["attention_bias"])),
        encoders.mlp(sizes, activation, bias=bias, down_bias=bias),
        lambda name: Norm(sizes.hidden_size, sizes.norm_eps, name=name),
        pre_norm=True,
        embedding_norm=False,
    )


def _classifier(config: Mapping[str, Any]) -> Encoder:
    pooling = config["classifier_pooling"]
    if pooling not in _POOLINGS:
        raise UnsupportedConfig(
            f"classifier_pooling = {pooling!r} is not implemented natively: its head would have to read every token"
        )
    return encoders.with_head(tree(config), encoders.label_count(config), "gelu")


def _pooled(config: Mapping[str, Any]) -> Pooled:
    labels, by = encoders.label_count(config), _POOLINGS[config["classifier_pooling"]]
    return Pooled(rotary_positions(config), labels, by)


_NAMES: dict[str, str] = {
    **GATED_NAMES,
    "embed_tokens": "model.embed_tokens",
    **{f"layers.*.self_attn.{each}_proj": f"model.layers.*.self_attn.{each}_proj" for each in "qkvo"},
    "layers.*.input_layernorm": "model.layers.*.attention_norm",
    "layers.*.post_attention_layernorm": "model.layers.*.mlp_norm",
    "norm": "model.final_norm",
}
_PREFIX = "model."
ARCHITECTURE = Architecture(
    name="EuroBertModel",
    tree=tree,
    pooled=encoders.mean_pooled(rotary_positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="eurobert",
    weights=(Rename(prefix=_PREFIX, names=_NAMES), Skip(("lm_head.weight", "lm_head.bias"))),
)
MASKED = ARCHITECTURE._replace(name="EuroBertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    name="EuroBertForSequenceClassification",
    tree=_classifier,
    pooled=_pooled,
    model_type=None,
    weights=(Rename(prefix=_PREFIX, names={**_NAMES, "dense": "head.dense", "classifier": "score"}),),
)
