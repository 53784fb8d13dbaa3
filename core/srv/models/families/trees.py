"""What a model is made of: the tree of its architecture, from the fields of its configuration. Torch-free.

Sizes are known of many models that `srv` cannot run, so that `srv plan` can say what they would need: of those whose
architecture has no layers, and of those whose layers refuse a field that decides no size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from srv.kept import kept_per_object
from srv.models.blueprint import Experts, Part
from srv.models.derive import distinct, parameters
from srv.models.families.architecture import Architecture, Pooled
from srv.models.families.builders.decoder_fields import UNSUPPORTED_UNLESS
from srv.models.families.registry import BUILT_IN, find
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.unsupported import InvalidConfig, UnknownSizes, UnsupportedConfig

if TYPE_CHECKING:
    from srv.specs import ModelFacts

MAX_LAYERS = 10_000  # so that a damaged file cannot cause huge allocations
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
# Fields that change what a model computes, but neither its weights nor its cache.
_COMPUTED = {
    *(name for name in UNSUPPORTED_UNLESS if name not in (*COUNT_FIELDS, "no_rope_layers")),
    *("rope_scaling", "rope_parameters", "hidden_activation", "activation_function", "topk_method", "scoring_func"),
    *("n_group", "topk_group", "norm_topk_prob", "swiglu_limit", "use_bidirectional_attention"),
}
_WHOLE_HEADS: Mapping[str, Any] = MappingProxyType({"partial_rotary_factor": 1.0, "rotary_pct": 1.0})
# What the function of an architecture raises for a value that it cannot compute with.
_FAULTS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


def native_tree(name: str, config: Mapping[str, Any]) -> Part:
    """The blueprint for native layers. Raises UnsupportedConfig with what they do not implement, and InvalidConfig."""
    architecture = find(name)
    if architecture is None or architecture.layers is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    return _tree(architecture, config)


def native_tree_or_reason(name: str, config: Mapping[str, Any]) -> Part | str:
    """As `native_tree`; a clause that says why no native layers compute the model, also of an invalid configuration.

    A launch refuses the latter when it builds the model.
    """
    try:
        return native_tree(name, config)
    except (UnsupportedConfig, InvalidConfig) as error:
        return str(error)


@kept_per_object
def native_tree_of_model(model: ModelFacts) -> Part | str:
    """As `native_tree_or_reason`, of a model. Kept, so that all callers share one tree and the walks over it."""
    return native_tree_or_reason(model.architecture, model.config)


def pooled_of(name: str, config: Mapping[str, Any]) -> Pooled | None:
    """What a model with native layers says of itself that generates no text; None of the others.

    `config`: fields of which `native_tree` makes a tree.
    """
    architecture = find(name)
    if architecture is None or architecture.pooled is None:
        return None
    fields = architecture.with_defaults(config)
    if name in BUILT_IN:
        return architecture.pooled(fields)
    from srv.models.families import third_party

    return third_party.pooled(architecture, fields)


def tree_for_sizes(name: str, config: Mapping[str, Any]) -> Part:
    """What a model is made of, with layers or without.

    Raises UnknownSizes if the architecture is not known, or the configuration does not determine its sizes, and
    InvalidConfig.
    """
    architecture = find(name)
    if architecture is None:
        raise UnknownSizes(f"{name} is an unknown architecture")
    try:
        return tree_without_computation(architecture, config)
    except UnsupportedConfig as error:
        raise UnknownSizes(str(error)) from error


def tree_without_computation(architecture: Architecture, config: Mapping[str, Any]) -> Part:
    """The tree of a configuration, also where a launch refuses fields that decide no size; these have their defaults.

    Raises UnsupportedConfig for the other fields, and InvalidConfig.
    """
    try:
        return _tree(architecture, config)
    except UnsupportedConfig as error:
        refused = error
    kept = {field: value for field, value in config.items() if field not in _COMPUTED}
    try:
        return _tree(architecture, {**kept, **_WHOLE_HEADS})
    except UnsupportedConfig:
        raise refused from None


def _tree(architecture: Architecture, config: Mapping[str, Any]) -> Part:
    try:
        return _made(architecture, config)
    except (UnsupportedConfig, InvalidConfig):
        raise
    except _FAULTS as error:
        raise InvalidConfig(_blamed(architecture, config, error)) from error


def _made(architecture: Architecture, config: Mapping[str, Any]) -> Part:
    fields = architecture.with_defaults(config)
    for each in (fields, fields.get("text_config"), fields.get("vision_config")):
        _check_layers(each if isinstance(each, Mapping) else {})
    if architecture.name in BUILT_IN:
        made = architecture.tree(fields)
    else:
        from srv.models.families import third_party  # most installations do not need it

        made = third_party.tree(architecture, fields)
    shapes = (shape for part in distinct(made) for shape in _shapes(part))
    experts = (part.count for part in distinct(made) if isinstance(part, Experts))
    whole = isinstance(parameters(made), int)
    if not whole or any(count < 1 for count in experts) or any(min(shape, default=1) < 0 for shape in shapes):
        raise ValueError("one of its fields has a value that is no size")
    return made


def _check_layers(config: Mapping[str, Any]) -> None:
    for name in (each for each in _LAYERS if config.get(each) is not None):
        if not isinstance(config[name], int) or not 0 <= config[name] <= MAX_LAYERS:
            raise ValueError(f"{name} is {config[name]!r}, which is not a number of layers")


def _blamed(architecture: Architecture, config: Mapping[str, Any], error: Exception) -> str:
    """A clause that names the field without whose value a tree could be made; else what was raised."""
    others: list[str] = []
    for name, value, without in _each_left_out(config):
        clause = f"{name} is {value!r:.80}, with which no model can be made"
        try:
            _made(architecture, without)
        except UnsupportedConfig:
            others.append(clause)  # it gets further, perhaps not far enough
        except _FAULTS:
            continue
        else:
            return clause
    if isinstance(error, KeyError) and error.args[0] not in config:
        return f"the field {error.args[0]} is missing"
    empty = (name for name, value in architecture.with_defaults(config).items() if value is None)
    others += (
        f"{name} is null, with which no model can be made" for name in empty if _needs(architecture, config, name)
    )
    return next(iter(others), f"one of its fields has an invalid value ({type(error).__name__}: {error})")


def _needs(architecture: Architecture, config: Mapping[str, Any], name: str) -> bool:
    """Whether a number in a field makes a difference."""
    try:
        _made(architecture, {**config, name: 1})
    except UnsupportedConfig:
        return True
    except _FAULTS:
        return False
    return True


def _each_left_out(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, value, the configuration without it) of each field, those of nested objects first."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            for inner, own, rest in _each_left_out(value, f"{prefix}{name}."):
                yield inner, own, {**config, name: rest}
        yield f"{prefix}{name}", value, {other: kept for other, kept in config.items() if other != name}


def _shapes(part: Part) -> Iterator[tuple[int, ...]]:
    """Those of the weights of a part; of experts, whose number may be any, the sizes."""
    if isinstance(part, Experts):
        yield part.count, part.hidden, part.inner
    else:
        yield from (weight.shape for weight in part.weights())
