"""EuroBERT (Boizard et al. 2025, arXiv:2503.05500): the layers of Llama with attention in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.architectures.architecture import Architecture
from srv.models.architectures.encoder_config import LAYERS, EncoderSizes, HeadConfig, encoder_of, gated, label_count
from srv.models.architectures.rotary_encoder import GATED_NAMES, rotary_encoder
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.layers.rope_config import UnsupportedConfig

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


def sizes(config: Mapping[str, Any]) -> EncoderSizes:
    fields = {**config, "layer_norm_eps": config["rms_norm_eps"], "type_vocab_size": 0}
    made = rotary_encoder(fields, gated(config, "hidden_act"))
    kv_heads = int(config["num_key_value_heads"])
    if made.heads % kv_heads:
        raise UnsupportedConfig(f"{made.heads} heads cannot share {kv_heads} key heads")
    return made._replace(
        kv_heads=kv_heads,
        pre_norm=True,
        embedding_norm=False,
        rms=True,
        norm_bias=False,
        attention_bias=bool(config["attention_bias"]),
        mlp_bias=bool(config["mlp_bias"]),
        down_bias=bool(config["mlp_bias"]),
    )


def _classifier(config: Mapping[str, Any]) -> EncoderSizes:
    pooling = config["classifier_pooling"]
    if pooling not in _POOLINGS:
        raise UnsupportedConfig(
            f"classifier_pooling = {pooling!r} is not implemented natively: its head would have to read every token"
        )
    return sizes(config)._replace(head=HeadConfig(label_count(config), "gelu"), pooled_by=_POOLINGS[pooling])


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
    make_config=encoder_of(sizes),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="eurobert",
    weights=(Rename(prefix=_PREFIX, names=_NAMES), Skip(("lm_head.weight", "lm_head.bias"))),
)
MASKED = ARCHITECTURE._replace(name="EuroBertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    name="EuroBertForSequenceClassification",
    make_config=encoder_of(_classifier),
    model_type=None,
    weights=(Rename(prefix=_PREFIX, names={**_NAMES, "dense": "head.dense", "classifier": "score"}),),
)
