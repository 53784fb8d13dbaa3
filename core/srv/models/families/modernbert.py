"""ModernBERT: norms before the layers, gated MLPs, and rotary positions with one base for local and one for global
layers (Warner et al. 2024, arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import Attention, alike
from srv.models.blueprint.encoders import Encoder
from srv.models.checkpoints.gguf_layout import BOTH_WAYS, ENCODER_NAMES, GGUFLayout, layer_names
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture, Pooled
from srv.models.families.builders import encoders
from srv.models.families.builders.decoder_fields import windows_of_types
from srv.models.families.builders.encoders import LAYERS
from srv.models.families.builders.layer_norm import ACTIVATIONS
from srv.models.layers.rope_config import RopeConfig, rope_config
from srv.models.unsupported import refuse_unless

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_BASES = {_LOCAL: ("local_rope_theta", 10_000.0), _GLOBAL: ("global_rope_theta", 160_000.0)}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu",),
    "classifier_pooling": ("cls", "mean"),
    "classifier_activation": tuple(ACTIVATIONS),
}


def tree(config: Mapping[str, Any]) -> Encoder:
    refuse_unless(config, _SUPPORTED)
    heads, head_dim = encoders.head_sizes(config)
    layers, every = int(config["num_hidden_layers"]), int(config["global_attn_every_n_layers"])
    kinds = config.get("layer_types") or [_LOCAL if index % every else _GLOBAL for index in range(layers)]
    windows = windows_of_types(kinds, layers, int(config["local_attention"]) // 2 + 1)
    ropes = {kind: _rope(config, kind, head_dim) for kind in set(kinds)}
    sizes = encoders.encoder_sizes(config, heads, head_dim, float(config["norm_eps"]))
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])

    def attention(kind: tuple[str, int | None]) -> Attention:
        name, window = kind
        return encoders.attention(sizes, bias=bias, rope=ropes[name], window=window, fused=True)

    return encoders.encoder(
        sizes,
        alike(zip(kinds, windows, strict=True), attention),
        encoders.mlp(sizes, "gelu_gated", bias=mlp_bias, down_bias=mlp_bias, fused=True),
        encoders.layer_norm(sizes, bias=bool(config["norm_bias"])),
        pre_norm=True,
    )


def positions(config: Mapping[str, Any]) -> int:
    return int(config["max_position_embeddings"])


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeConfig:
    """The rotary embedding of layers of one kind, from the fields of transformers 5 or of before."""
    name, base = _BASES[kind]
    given = (config.get("rope_parameters") or {}).get(kind) or {}
    parameters = {"rope_theta": config.get(name) or base, **(config.get("rope_scaling") or {}), **given}
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    return rope_config({**plain, "rope_parameters": parameters}, head_dim)


def _classifier(config: Mapping[str, Any]) -> Encoder:
    labels, activation = encoders.label_count(config), ACTIVATIONS[config["classifier_activation"]]
    made = tree(config)
    norm = None if made.stack.final_norm is None else replace(made.stack.final_norm, name="head.norm")
    return encoders.with_head(made, labels, activation, bias=bool(config["classifier_bias"]), norm=norm)


def _pooled(config: Mapping[str, Any]) -> Pooled:
    return Pooled(positions(config), encoders.label_count(config), str(config["classifier_pooling"]))


_NAMES: dict[str, str] = {
    "embeddings.tok_embeddings": "model.embed_tokens",
    "embeddings.norm": "model.embed_norm",
    "layers.*.attn_norm": "model.layers.*.attention_norm",
    "layers.*.attn.Wqkv": "model.layers.*.self_attn.qkv_proj",
    "layers.*.attn.Wo": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.mlp_norm",
    "layers.*.mlp.Wi": "model.layers.*.mlp.gate_up_proj",
    "layers.*.mlp.Wo": "model.layers.*.mlp.down_proj",
    "final_norm": "model.final_norm",
}
_PREFIX = "model."
_MASKED_HEAD = ("head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias")
ARCHITECTURE = Architecture(
    name="ModernBertModel",
    tree=tree,
    gguf=GGUFLayout(
        "modern-bert",
        weights=(
            *ENCODER_NAMES,
            Rename({"output_norm": "model.final_norm"}),
            layer_names({"attn_norm": "attention_norm", "ffn_norm": "mlp_norm", "ffn_up": "mlp.gate_up_proj"}),
        ),
        fields={
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "rope.freq_base": "global_rope_theta",
        },
        optional_fields={
            "hidden_activation": "hidden_activation",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "rope.freq_base_swa": "local_rope_theta",
        },
        whole=("self_attn.qkv_proj", "gate_up_proj"),
        implied=BOTH_WAYS,
    ),
    pooled=encoders.mean_pooled(positions),
    defaults=_DEFAULTS,
    layers=LAYERS,
    model_type="modernbert",
    weights=(Rename(prefix=_PREFIX, names=_NAMES), Skip((*_MASKED_HEAD, "decoder.weight", "decoder.bias"))),
)
MASKED = ARCHITECTURE._replace(gguf=None, name="ModernBertForMaskedLM", model_type=None)
CLASSIFIER = ARCHITECTURE._replace(
    gguf=None,
    name="ModernBertForSequenceClassification",
    tree=_classifier,
    pooled=_pooled,
    model_type=None,
    weights=(
        Rename(
            prefix=_PREFIX,
            names={**_NAMES, "head.dense": "head.dense", "head.norm": "head.norm", "classifier": "score"},
        ),
    ),
)
