"""How a model rotates its heads, as data: from the `rope_parameters` or `rope_scaling` of a configuration.

Torch-free. Owns the names and defaults of the variants; `srv.models.rope` computes with them. The dialects are
those of transformers: `rope_parameters` since version 5, `rope_scaling` beside `rope_theta` before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "divisors")
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
    "divisors": ("divisors",),
}
OLD_NAMES = {"su": "longrope"}
DEFAULT_THETA = 10000.0


class UnsupportedConfig(ValueError):
    """A configuration asks for something that the native layers do not do; the text is a clause."""


@dataclass(frozen=True)
class RopeConfig:
    """One rotation for all layers.

    `dim`: how many of a head's dimensions turn. `kind`: one of KINDS ("divisors" is GGUF's form of llama3: a
    divisor for each frequency). `parameters` holds the variant's own numbers, `original` the context of
    pre-training in tokens, `context` the model's declared one.
    """

    theta: float
    dim: int
    kind: str
    context: int
    original: int
    parameters: Mapping[str, Any]


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The variant's parameters with `rope_type` and `rope_theta` filled in, whichever dialect they came in."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedConfig("its RoPE parameters differ between kinds of layers")
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    return {**given, "rope_type": OLD_NAMES.get(kind, kind), "rope_theta": float(theta)}


def original_context(config: Mapping[str, Any], parameters: Mapping[str, Any], context: int) -> int:
    """Tokens of context in pre-training; a field beside the parameters (Phi-3's way) comes first."""
    named = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(named or context)


def usable_context(config: Mapping[str, Any], context: int) -> int:
    """The context length that one fixed rotation serves, from the declared `context`.

    YaRN reaches `factor` times its original context even where the declared length was left at the original.
    LongRoPE turns *all* keys of a text differently once it is longer than the original context; keys already
    in a cache would be wrong, and one long text would change its neighbours: it is served up to the original.
    """
    try:
        parameters = parameters_of(config)
    except UnsupportedConfig:
        return context
    original = original_context(config, parameters, context)
    if parameters["rope_type"] == "longrope":
        return min(context, original)
    if parameters["rope_type"] == "yarn" and parameters.get("factor"):
        return max(context, int(parameters["factor"] * original))
    return context


def rope_config(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotation of a native architecture. Raises UnsupportedConfig for a variant that is not known."""
    parameters = parameters_of(config)
    kind = parameters["rope_type"]
    if kind not in KINDS:
        raise UnsupportedConfig(f"RoPE type {kind!r} is not one of {', '.join(KINDS)}")
    missing = [name for name in REQUIRED.get(kind, ()) if parameters.get(name) is None]
    if missing:
        raise UnsupportedConfig(f"RoPE type {kind!r} lacks {', '.join(missing)}")
    fraction = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * fraction)
    if dim <= 0 or dim % 2:
        raise UnsupportedConfig(f"{dim} rotated dimensions of {head_dim} are not an even number")
    context = int(config["max_position_embeddings"])
    original = original_context(config, parameters, context)
    return RopeConfig(parameters["rope_theta"], dim, kind, context, original, parameters)
