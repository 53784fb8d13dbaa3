"""The parameters of rotary position embeddings, read from `rope_parameters` or `rope_scaling` of a configuration.

Torch-free. Owns the names and defaults of the variants; `srv.models.layers.rope` computes with them. Both forms are
those of transformers: `rope_parameters` since version 5; before that, `rope_scaling` next to `rope_theta`.

LongRoPE has two lists of factors: `short_factor` for sequences up to the context length of pre-training,
`long_factor` for *all* keys of a longer one. transformers chooses by each pass. A server cannot: the cached keys of a
sequence that grows beyond that length would be wrong, and one long sequence would change the results of others in its
batch. So one list is chosen at the start, by the served context length, as in vLLM:

    served context (--context-length, else the declared one) > context of pre-training   long factors for all tokens
                                                             otherwise                   short factors for all tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srv.models.unsupported import UnsupportedConfig

ROPE_TYPES = (
    *("default", "linear", "dynamic", "ntk_alpha", "yarn", "llama3", "longrope", "freq_factors", "proportional"),
)
FACTORS: dict[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor"), "freq_factors": ("freq_factors",)}
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    **FACTORS,
}
LEGACY_NAMES = {"su": "longrope"}
DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of all layers.

    `rotary_dim`: how many dimensions of a head are rotated. `rope_type`: one of ROPE_TYPES ("freq_factors" is how GGUF
    files store llama3 scaling: for each frequency, a factor by which it is divided; "proportional" rotates the
    other dimensions by 0; "ntk_alpha" is what Hunyuan calls "dynamic", with an `alpha` that enlarges the base).
    `context_length`: the model's declared one, in tokens; `original_context_length`: that of pre-training.
    `parameters`: the variant's own ones.
    """

    theta: float
    rotary_dim: int
    rope_type: str
    context_length: int
    original_context_length: int
    parameters: Mapping[str, Any]


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The variant's parameters from either form, with `rope_type` and `rope_theta` filled in."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedConfig("its RoPE parameters differ between kinds of layers")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "dynamic" and parameters.get("alpha"):
        rope_type = "ntk_alpha"
    theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    return {**parameters, "rope_type": LEGACY_NAMES.get(rope_type, rope_type), "rope_theta": float(theta)}


def original_context_length(config: Mapping[str, Any], parameters: Mapping[str, Any], context_length: int) -> int:
    """The context length of pre-training, in tokens.

    A field of the configuration itself, as in Phi-3, takes precedence over one of the RoPE parameters.
    """
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(original or context_length)


def usable_context(config: Mapping[str, Any], context_length: int) -> int:
    """The context length that can be served with one fixed table of frequencies, from the declared one.

    YaRN reaches `factor` times its original context length even if the declared one was left at the original.
    """
    try:
        parameters = rope_parameters(config)
    except UnsupportedConfig:
        return context_length
    original = original_context_length(config, parameters, context_length)
    if parameters["rope_type"] == "yarn" and parameters.get("factor"):
        return max(context_length, int(parameters["factor"] * original))
    return context_length


def long_rope_length(config: Mapping[str, Any], context_length: int) -> int | None:
    """The context length up to which a model with LongRoPE uses its short factors, if it has others beyond it.

    `context_length`: the declared one. None: the same frequencies serve every length.
    """
    try:
        parameters = rope_parameters(text := _text(config))
    except UnsupportedConfig:
        return None
    original = original_context_length(text, parameters, context_length)
    same = parameters.get("short_factor") == parameters.get("long_factor")
    return None if parameters["rope_type"] != "longrope" or same or original >= context_length else original


def limit_reason(config: Mapping[str, Any], context_length: int) -> str | None:
    """Why RoPE allows no more than the context length that a model has; None if it is not RoPE that limits it."""
    try:
        parameters = rope_parameters(text := _text(config))
    except UnsupportedConfig:
        return None
    original = original_context_length(text, parameters, context_length)
    if parameters["rope_type"] == "dynamic":
        return "beyond them, its dynamic RoPE scaling would change the frequencies of keys that are cached"
    if parameters["rope_type"] == "longrope" and original < context_length:
        return f"LongRoPE extends the {original} of pre-training to no more than these"
    if parameters["rope_type"] == "yarn" and original < context_length:
        return f"YaRN extends the {original} of pre-training to no more than these"
    return None


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the fields of the language model, which multimodal models nest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def rope_config(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding of a native architecture. Raises UnsupportedConfig for an unknown variant."""
    parameters = rope_parameters(config)
    rope_type = parameters["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise UnsupportedConfig(f"RoPE type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
    missing = [name for name in REQUIRED.get(rope_type, ()) if parameters.get(name) is None]
    if missing:
        raise UnsupportedConfig(f"RoPE type {rope_type!r} lacks {', '.join(missing)}")
    fraction = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * fraction)
    if rope_type == "proportional":
        rotary_dim, parameters["partial_rotary_factor"] = head_dim, fraction
    if rotary_dim <= 0 or rotary_dim % 2:
        raise UnsupportedConfig(f"{rotary_dim} rotated dimensions of {head_dim} are not an even number")
    for name in FACTORS.get(rope_type, ()):
        if len(parameters[name]) != rotary_dim // 2:
            reason = f"RoPE type {rope_type!r} has {len(parameters[name])} factors ({name}) for {rotary_dim // 2}"
            raise UnsupportedConfig(f"{reason} frequencies")
    context_length = int(config["max_position_embeddings"])
    original = original_context_length(config, parameters, context_length)
    return RopeConfig(parameters["rope_theta"], rotary_dim, rope_type, context_length, original, parameters)
