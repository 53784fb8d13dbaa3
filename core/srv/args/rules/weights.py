"""Rules of quantized weights: what a checkpoint is, what it can be made, and who multiplies that."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srv.models import int8, modelslim
from srv.models.facts import ModelFacts
from srv.platform.facts import Constraint, Default, Seen

_STORED = (modelslim.NAME, int8.NAME)
# Value of `torchao_config` -> capability.
_NEEDED: Mapping[str, str] = MappingProxyType({"int8dq": "w8a8", "int8wo": "int8_weights"})


def _method(model: ModelFacts) -> str | None:
    """The value of `quantization` that a checkpoint stands for; None: plain numbers, or no method that is known."""
    if model.format == "gguf":
        return "gguf"
    return model.quantization if model.quantization in _STORED else None


def _method_fits(seen: Seen) -> str | None:
    model, wanted = seen.model, seen["quantization"]
    if model is None or wanted is None or wanted == _method(model) or _undescribed(seen):
        return None
    own = "are not quantized" if model.quantization is None else f"are quantized with {model.quantization}"
    return f"the weights of {model.path} {own}"


def _undescribed(seen: Seen) -> bool:
    """Whether the user says that a checkpoint is of `int8.NAME`, and its configuration says nothing at all."""
    model = seen.model
    plain = model is not None and model.format != "gguf" and model.quantization is None
    return plain and seen["quantization"] == int8.NAME


def _integers_there(seen: Seen) -> str | None:
    if seen.model is None or not _undescribed(seen) or seen.model.in_integers:
        return None
    return f"none of the weights of {seen.model.path} are 8-bit integers"


def _plain_to_round(seen: Seen) -> str | None:
    model, wanted = seen.model, seen["torchao_config"]
    if model is None or wanted is None:
        return None
    stored = _method(model) or model.quantization or ("8-bit integers" if model.in_integers else None)
    if stored is None:
        return None
    return f"the weights of {model.path} are quantized already ({stored}), and {wanted} rounds plain ones"


def _layers_of_srv(seen: Seen) -> str | None:
    if seen["torchao_config"] is None or seen["model_impl"] != "transformers":
        return None
    return "the layers of transformers multiply plain weights alone"


def _integers_multiplied(seen: Seen) -> str | None:
    if seen["quantization"] not in _STORED or "w8a8" in seen.capabilities:
        return None
    return "the platform multiplies no 8-bit integers (capability w8a8)"


def _rounded_multiplied(seen: Seen) -> str | None:
    wanted = seen["torchao_config"]
    word = _NEEDED.get(wanted)
    if word is None or word in seen.capabilities:
        return None
    return f"the platform cannot multiply what {wanted} makes (capability {word})"


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "quantization", lambda seen: _method(seen.model) if seen.model else None, "the weights are stored in that way"
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("quantization", "other_method", _method_fits, "Leave it out: the checkpoint says how it is stored."),
    Constraint(
        "quantization",
        "no_integers",
        _integers_there,
        "Leave it out; --torchao-config int8dq makes such weights of plain ones as they are loaded.",
    ),
    Constraint(
        "torchao_config",
        "quantized_already",
        _plain_to_round,
        "Leave it out, or name the same model in full precision.",
    ),
    Constraint(
        "torchao_config",
        "native_layers_only",
        _layers_of_srv,
        "Leave --model-impl at auto, or leave it out.",
        reads=("model_impl",),
    ),
)

# Said only where a platform is known.
DEVICE_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "quantization",
        "capability_missing",
        _integers_multiplied,
        "Use the checkpoint in full precision, or another platform.",
    ),
    Constraint("torchao_config", "capability_missing", _rounded_multiplied, "Leave it out, or use another platform."),
)
