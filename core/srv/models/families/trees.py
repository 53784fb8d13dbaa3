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
from srv.models.unsupported import UnknownSizes, UnsupportedConfig

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


def native_tree(name: str, config: Mapping[str, Any]) -> Part:
    """The blueprint for native layers. Raises UnsupportedConfig with what they do not implement."""
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
    except UnsupportedConfig as error:
        return str(error)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"its configuration lacks a field or has an invalid value ({error!r})"


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

    Raises UnknownSizes if the architecture is not known, or the configuration does not determine its sizes.
    """
    architecture = find(name)
    if architecture is None:
        raise UnknownSizes(f"{name} is an unknown architecture: no size is claimed")
    for fields in (config, config.get("text_config"), config.get("vision_config")):
        _check_layers(fields if isinstance(fields, Mapping) else {})
    try:
        tree = tree_without_computation(architecture, config)
        _check(tree)
    except UnsupportedConfig as error:
        raise UnknownSizes(f"{error}: no size is claimed") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise UnknownSizes(f"config.json has a value that is no size ({type(error).__name__}: {error})") from error
    return tree


def tree_without_computation(architecture: Architecture, config: Mapping[str, Any]) -> Part:
    """The tree of a configuration, also where a launch refuses fields that decide no size; these have their defaults.

    Raises UnsupportedConfig for the other fields.
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
    fields = architecture.with_defaults(config)
    if architecture.name in BUILT_IN:
        return architecture.tree(fields)
    from srv.models.families import third_party  # most installations do not need it

    return third_party.tree(architecture, fields)


def _check_layers(config: Mapping[str, Any]) -> None:
    for count in (config[name] for name in _LAYERS if config.get(name) is not None):
        if not isinstance(count, int) or not 0 <= count <= MAX_LAYERS:
            raise UnknownSizes(f"{count!r} is not a number of layers")


def _check(tree: Part) -> None:
    shapes = (shape for part in distinct(tree) for shape in _shapes(part))
    if not isinstance(parameters(tree), int) or any(min(shape, default=1) < 0 for shape in shapes):
        raise UnknownSizes("config.json has a value that is no size")


def _shapes(part: Part) -> Iterator[tuple[int, ...]]:
    """Those of the weights of a part; of experts, whose number may be any, the sizes."""
    if isinstance(part, Experts):
        yield part.count, part.hidden, part.inner
    else:
        yield from (weight.shape for weight in part.weights())
