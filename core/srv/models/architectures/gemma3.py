"""Gemma 3 (text): the facts of a decoder whose layers have four norms, and most of which attend to a sliding window.

Layers with a window have a rotary embedding of their own. Torch-free; `gemma3_layers` computes. GGUF files contain
neither `query_pre_attn_scalar` nor, usually, which layers have a window; both are filled in as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.architectures.architecture import Architecture, DividedSizes
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config, windows_of_types
from srv.models.formats.gguf_layout import GGUFLayout
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig, rope_config
from srv.specs import AttentionLayer

KINDS = ("full_attention", "sliding_attention")
PATTERN = 6  # every sixth layer has full attention
LAYERS_OF_27B = 62  # the one size whose attention scale does not follow from the size of its heads
# Only these values of fields that change the computation are implemented; None is as if the field were left out.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (False,),
}


class Gemma3Config(NamedTuple):
    """`decoder`: the sizes, with the rotary embedding of layers with full attention. `local_rope`: that of the others.

    `decoder.embedding_multiplier` is not rounded to the model's dtype yet.
    """

    decoder: DecoderConfig
    local_rope: RopeConfig

    @property
    def parameters(self) -> int:
        """Each layer has two more norms than that of a Llama-like decoder."""
        return self.decoder.parameters + 2 * self.decoder.layers * self.decoder.hidden_size

    @property
    def projection_params(self) -> int:
        return self.decoder.projection_params

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self.decoder.attention_layers

    @property
    def divided(self) -> DividedSizes | None:
        return self.decoder.divided

    def of_rank(self, ranks: int) -> Gemma3Config:
        return self._replace(decoder=self.decoder.of_rank(ranks))


def make_config(config: Mapping[str, Any]) -> Gemma3Config:
    for name, supported in SUPPORTED.items():
        if config.get(name) is not None and config[name] not in supported:
            raise UnsupportedConfig(f"{name} = {config[name]!r} is not implemented natively")
    full, local = (_with_rope(config, kind) for kind in KINDS)
    base = decoder_config(full, reads=("hidden_act",))  # which transformers does not read for this architecture
    local_rope = rope_config(local, base.head_dim)
    for rope in (base.rope, local_rope):
        if rope.rotary_dim != base.head_dim:
            reason = f"rotary embeddings of only {rope.rotary_dim} of {base.head_dim} dimensions"
            raise UnsupportedConfig(f"{reason} are not implemented natively")
    bias, scalar = bool(config["attention_bias"]), float(config["query_pre_attn_scalar"])
    if not scalar > 0:
        raise UnsupportedConfig(f"query_pre_attn_scalar = {scalar} is not a positive number")
    decoder = base._replace(
        windows=_windows(config, base.layers),
        attention_scale=scalar**-0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        embedding_multiplier=base.hidden_size**0.5,
    )
    return Gemma3Config(decoder, local_rope)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: by `layer_types`, or in all but every `sliding_window_pattern`-th layer."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    if types is None:
        pattern = int(config["sliding_window_pattern"])
        if pattern < 1:
            raise UnsupportedConfig(f"sliding_window_pattern = {pattern} is not a number of layers")
        types = [KINDS[bool((layer + 1) % pattern)] for layer in range(layers)]
    if "sliding_attention" in types and (window is None or window < 1):
        raise UnsupportedConfig(f"sliding_window = {window!r} of layers of sliding_attention is not a number of tokens")
    return windows_of_types(types, layers, int(window or 0))


def _with_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The configuration with the rotary embedding of one kind of layers.

    It is in `rope_parameters`, by kind; before transformers 5, `rope_theta` and `rope_scaling` were those of layers
    with full attention, and `rope_local_base_freq` that of the others, which have no scaling.
    """
    given = config.get("rope_parameters") or {}
    others = sorted(set(given) - set(KINDS))
    if others:
        raise UnsupportedConfig(f"rope_parameters has {', '.join(others)} beside the kinds of layers")
    parameters = dict(given.get(kind) or {})
    if kind == "full_attention":
        parameters |= config.get("rope_scaling") or {}
    theta = config["rope_theta" if kind == "full_attention" else "rope_local_base_freq"]
    parameters.setdefault("rope_theta", theta)
    if (parameters.get("rope_type") or parameters.get("type")) in ("longrope", "su"):
        raise UnsupportedConfig(f"RoPE type 'longrope' of {kind} layers is not implemented natively")
    return {**config, "rope_parameters": parameters, "rope_scaling": None}


def _complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a GGUF file, with what llama.cpp derives from the number of layers and other sizes."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    scalar = config["hidden_size"] // heads if layers == LAYERS_OF_27B else config["head_dim"]
    local = {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 10000.0)}
    return {
        **{name: value for name, value in config.items() if name not in ("hidden_act", "use_sliding_window")},
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(config["sliding_window"]),
        "sliding_window_pattern": int(config.get("sliding_window_pattern", PATTERN)),
        "rope_parameters": dict(zip(KINDS, (config["rope_parameters"], local), strict=True)),
    }


ARCHITECTURE = Architecture(
    name="Gemma3ForCausalLM",
    make_config=make_config,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": PATTERN,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    gguf=GGUFLayout(
        "gemma3",
        layer_names={
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        fields={"attention.sliding_window": "sliding_window"},
        optional_fields={
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        complete=_complete_gguf,
        norms_plus_one=True,
    ),
    layers="srv.models.architectures.gemma3_layers:Gemma3",
    model_type="gemma3_text",
)
