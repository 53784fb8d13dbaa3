"""The defaults of configuration fields, of native architectures as well, are those of transformers' classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sizes_published import model_type_of
from sizes_reference import KNOWN, config_class

from srv.models.derive import active_parameters, cache_groups, parameters
from srv.models.families.registry import find
from srv.models.families.trees import tree_for_sizes
from srv.models.families.vision_models import TEXT_DEFAULTS
from srv.models.unsupported import InvalidConfig, UnknownSizes

# Values that mean the same as transformers' own, or that its class leaves to a file of the checkpoint.
OTHERWISE = {"eos_token_id", "time_step_limit", "mlp_only_layers"}
# Nothing follows from a configuration that states nothing, or native layers compute no such model.
UNKNOWN = {
    "BambaForCausalLM": "attn_layer_indices = [] names no layer with attention",
    "DeepseekV2ForCausalLM": "num_experts_per_tok",
    "Dots1ForCausalLM": "one of its fields has an invalid value",
    "GraniteMoeHybridForCausalLM": "layer_types has no layer of full_attention",
    "NemotronHForCausalLM": "config.json lacks hybrid_override_pattern",
}


def of_class(model_type: str) -> dict[str, Any]:
    """The defaults of all fields of a configuration class."""
    fields = dataclasses.fields(config_class(model_type))
    made = {each.name: each.default_factory() for each in fields if each.default_factory is not dataclasses.MISSING}
    stated = {each.name: each.default for each in fields if each.default is not dataclasses.MISSING}
    return {**stated, **made}


def differing(given: Mapping[str, Any], config: Any, theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields that have another default in transformers: (ours, theirs)."""
    own = {name: name if name in theirs else config.attribute_map.get(name, name) for name in given}
    known = {name: real for name, real in own.items() if real in theirs and name not in OTHERWISE}
    return {name: (given[name], theirs[real]) for name, real in known.items() if given[name] != theirs[real]}


def test_defaults_are_those_of_transformers() -> None:
    wrong = {}
    for name in KNOWN:
        facts, kind = find(name), model_type_of(name)
        given = {} if facts is None else facts.defaults
        assert given
        wrong[name] = differing(given, config_class(kind), of_class(kind))
    for kind, given in TEXT_DEFAULTS.items():
        wrong[kind] = differing(given, config_class(kind), of_class(kind))
    assert {name: found for name, found in wrong.items() if found} == {}


def sizes(architecture: str, config: Mapping[str, Any]) -> object:
    """Those of a model, or the reason why they are not known."""
    try:
        tree = tree_for_sizes(architecture, config)
    except (InvalidConfig, UnknownSizes) as error:
        return str(error)
    return parameters(tree), active_parameters(tree), cache_groups(tree, 1 << 30, "bfloat16")


def test_a_configuration_that_states_nothing_has_the_sizes_of_one_that_states_all_defaults() -> None:
    """So no field that a family reads lacks its default."""
    wrong = {}
    for name in KNOWN:
        ours, theirs = sizes(name, {}), sizes(name, of_class(model_type_of(name)))
        if name in UNKNOWN:
            assert UNKNOWN[name] in str(ours)
        elif isinstance(ours, str) or ours != theirs:
            wrong[name] = (ours, theirs)
    assert wrong == {}
