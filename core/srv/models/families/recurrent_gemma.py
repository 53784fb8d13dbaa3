"""RecurrentGemma: the facts of a decoder whose layers have a gated linear recurrence, or attention to a window.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Linear, Part, Tensors, alike
from srv.models.blueprint.recurrent import LinearRecurrence
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes, soft_cap
from srv.models.layers.recurrent_sizes import LinearRecurrenceSizes
from srv.models.layers.rope_config import rope_parameters
from srv.models.unsupported import UnsupportedConfig, refuse_unless

KINDS = ("recurrent", "attention")
MIXER, NORMS = "temporal_block", ("temporal_pre_norm", "channel_pre_norm")


def tree(config: Mapping[str, Any]) -> Part:
    """Norms are computed in float32. Models of every dtype were trained with the factor as bfloat16 rounds it."""
    refuse_unless(config, {"hidden_activation": ("gelu_pytorch_tanh",), "embeddings_scale_by_sqrt_dim": (True,)})
    read = {**config, "intermediate_size": int(config["intermediate_size"]) // 2}  # is that of both inner layers
    sizes = decoder_sizes(read, reads=("partial_rotary_factor",))
    rope_type = rope_parameters(read)["rope_type"]
    if rope_type != "default":
        raise UnsupportedConfig(f"RoPE type {rope_type!r} is not implemented for this architecture")
    attends, window = _attending(config["block_types"], sizes.layers), config["attention_window_size"]
    if window is None or window < 1:
        raise UnsupportedConfig(f"attention_window_size = {window!r} is not a number of tokens")
    channels = sizes.hidden_size if config["lru_width"] is None else int(config["lru_width"])
    if channels % sizes.heads:
        raise UnsupportedConfig(f"lru_width = {channels} is not a multiple of {sizes.heads} heads")
    attention = parts.attention(
        sizes, bias=bool(config["attention_bias"]), output_bias=True, window=int(window), name=MIXER
    )
    cap = soft_cap(config, "logits_soft_cap")
    recurrence = _recurrence(sizes, channels, int(config["conv1d_width"]))
    mlp = parts.mlp(sizes, True, "gelu_tanh_gated")

    def layer(has_attention: bool) -> Layer:
        return parts.pre_norm(sizes, attention if has_attention else recurrence, mlp, names=NORMS, wide=True)

    return parts.decoder(
        sizes,
        alike(attends, layer),
        parts.last_norm(sizes, wide=True),
        factor=sizes.hidden_size**0.5,
        factor_dtype="bfloat16",
        logits_soft_cap=cap,
    )


def _recurrence(sizes: Sizes, channels: int, width: int) -> LinearRecurrence:
    """`channels`: those of the recurrence. `width`: the tokens that its convolution reads."""
    hidden, heads, block = sizes.hidden_size, sizes.heads, channels // sizes.heads
    shapes: dict[str, tuple[int, ...]] = {"conv_1d.weight": (channels, 1, width), "conv_1d.bias": (channels,)}
    for gate in ("input_gate", "recurrent_gate"):
        shapes |= {f"rg_lru.{gate}_weight": (heads, block, block), f"rg_lru.{gate}_bias": (heads, block)}
    return LinearRecurrence(
        Linear({"linear_x": channels, "linear_y": channels}, hidden, True, split="out", unit=block),
        Tensors({**shapes, "rg_lru.recurrent_param": (channels,)}, divided=True),
        Linear({"linear_out": hidden}, channels, True, split="in"),
        LinearRecurrenceSizes(channels, width),
        heads,
        name=MIXER,
    )


def _attending(pattern: list[str], layers: int) -> tuple[bool, ...]:
    """Whether each layer has attention. `pattern`: the kinds of the first layers, which are repeated."""
    unknown = sorted(set(pattern) - set(KINDS))
    if unknown or not pattern:
        reason = f"contains the unknown {', '.join(map(repr, unknown))}" if unknown else "is empty"
        raise UnsupportedConfig(f"block_types {reason}")
    attends = tuple(pattern[index % len(pattern)] == "attention" for index in range(layers))
    if not any(attends):
        raise UnsupportedConfig(f"block_types gives none of {layers} layers attention")
    return attends


ARCHITECTURE = Architecture(
    name="RecurrentGemmaForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2560,
        "intermediate_size": 7680,
        "num_hidden_layers": 26,
        "num_attention_heads": 10,
        "num_key_value_heads": None,
        "max_position_embeddings": 8192,
        "lru_width": None,
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "hidden_activation": "gelu_pytorch_tanh",
        "block_types": ("recurrent", "recurrent", "attention"),
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    model_type="recurrent_gemma",
    weights=(Rename({"model.final_norm": "model.norm"}, parts={"mlp_block": "mlp"}),),
    runs_through_transformers=False,
)
