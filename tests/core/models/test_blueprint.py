"""The blueprint of a model: layers hold the weights that it names, and what follows from it is one walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from every import every
from models_small import HOST, reference_ops
from small_configurations import configurations, for_two_ranks

from srv.dist.group import RankGroup
from srv.dist.mesh import Mesh
from srv.errors import InternalError
from srv.models import blueprint, derive
from srv.models.blueprint import Experts, Factors, Linear, Norm, Output, Part, alike, below, walk
from srv.models.build import load_layers
from srv.models.facts.sharding import Divisions
from srv.models.families.registry import built_in_native_names
from srv.models.families.trees import native_tree
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection
from srv.models.modules.attention import Attention
from srv.models.modules.decoder import Decoder

BERT = {"vocab_size": 100, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3, "num_labels": 5}


def native(name: str) -> Part:
    return native_tree(name, configurations()[name])


def tree(**fields: object) -> Part:
    return native_tree("BertForSequenceClassification", {**BERT, **fields})


def shapes(part: Part) -> dict[str, tuple[int, ...]]:
    return {below(prefix, weight.name): weight.shape for prefix, each in walk(part) for weight in each.weights()}


def test_layers_hold_the_weights_that_blueprints_name() -> None:
    """Of every class; also the parameters in matrices are those of the layers."""
    for name in configurations():
        tree, context = native(name), BuildContext(HOST, torch.float32, reference_ops())
        model = load_layers(name)(tree, LayerFactory(context), 64)
        assert shapes(tree) == {each: tuple(view.shape) for each, view in model.weight_views().items()}, name
        assert derive.attention_layers(tree) == model.attention_layers, name
        assert derive.parameters(tree) == sum(view.numel() for view in model.weight_views().values()), name
        linear = (each for each in model.modules() if isinstance(each, Projection | ExpertWeights) and not each.role)
        held = Counter(part for layer in linear for part in layer.weight_views())
        named = {
            below(prefix, f"{each}.weight")
            for prefix, part in walk(tree)
            if isinstance(part, Linear) and not part.role and not (isinstance(part, Output) and part.tied)
            for each in part.outputs
        }
        assert named <= set(held), name


def test_every_class_with_native_layers_has_a_small_model_here() -> None:
    alike_classes = {"MaskedLM", "SequenceClassification"}  # of encoders, whose other classes are among them
    missing = set(built_in_native_names()) - set(configurations())
    assert {name for name in missing if not name.endswith(tuple(f"For{each}" for each in alike_classes))} <= {
        "XLMRobertaModel"
    }


def test_the_first_of_two_ranks_has_the_weights_that_its_blueprint_names() -> None:
    """Of every class: none is on one rank whatever its sizes are."""
    for name, fields in configurations().items():
        tree = native_tree(name, for_two_ranks(fields))
        sizes = derive.divided(tree)
        assert sizes is not None, name
        assert Divisions(sizes).obstacles(Mesh(2)) == [], name
        part, group = tree.of_rank(2), RankGroup(rank=0, size=2)
        model = load_layers(name)(tree, LayerFactory(BuildContext(HOST, torch.float32, reference_ops(), group)), 64)
        views = {each: tuple(view.shape) for each, view in model.weight_views().items()}
        assert shapes(part) == views, name
        assert derive.attention_layers(part) == model.attention_layers, name


def test_layers_that_are_alike_are_one_object() -> None:
    layers = alike([1, 2, 1], lambda size: Linear({"down": size}, 3))
    assert layers[0] is layers[2]
    assert layers[0] != layers[1]
    assert [layer.outputs["down"] for layer in layers] == [1, 2, 1]


def test_names_say_where_a_part_is() -> None:
    named = dict(walk(tree(num_hidden_layers=2)))
    assert {"", "model", "model.embed_norm", "model.layers.1.self_attn", "model.layers.1.mlp_norm"} < set(named)
    assert below("", "score") == below("score", "") == "score"


def test_parameters_are_those_of_a_count_by_hand() -> None:
    hidden, inner, tables = 12, 20, 100 + 512 + 2
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 2 * 2 * hidden
    head = (hidden + 1) * hidden + (hidden + 1) * 5
    assert derive.parameters(tree(num_hidden_layers=3)) == tables * hidden + 2 * hidden + 3 * layer + head
    assert derive.projection_parameters(tree(num_hidden_layers=3)) == 3 * (4 * hidden + 2 * inner) * hidden


def test_experts_are_counted_as_they_are_named() -> None:
    experts = Experts(3, 2, 8, 5, bias=True)
    assert experts.elements == sum(weight.elements for weight in experts.weights()) == 3 * (3 * 8 * 5 + 2 * 5 + 8)
    assert experts.projected == 3 * 3 * 8 * 5


def test_a_walk_that_nobody_has_prepared_is_a_few_lines() -> None:
    """As for adapters: the linear layers of each kind, with their sizes, whatever the family."""
    targets: Counter[tuple[str, int, int]] = Counter()
    for _, part in walk(tree(num_hidden_layers=3)):
        if isinstance(part, Linear):
            targets.update((name, part.inputs, outputs) for name, outputs in part.outputs.items())
    square = {(name, 12, 12): 3 for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    expected: Mapping[tuple[str, int, int], int] = {
        **square,
        ("up_proj", 12, 20): 3,
        ("down_proj", 20, 12): 3,
        ("head.dense", 12, 12): 1,
        ("score", 12, 5): 1,
    }
    assert targets == expected


def built(tree: Part) -> Decoder:
    assert isinstance(tree, blueprint.Decoder)
    return Decoder(tree, LayerFactory(BuildContext(HOST, torch.float32, reference_ops())), 64)


def test_layers_share_the_tables_of_positions() -> None:
    """A table has a row for each position of the context, of which models may have ten million."""
    fields = {**configurations()["Llama4ForCausalLM"], "num_hidden_layers": 8, "no_rope_layers": [1, 0, 1, 0] * 2}
    fields |= {"layer_types": None, "moe_layers": None}
    model = built(native_tree("Llama4ForCausalLM", fields))
    attention = [each for each in model.modules() if isinstance(each, Attention)]
    scaled = [each.query_factors for each in attention if each.query_factors is not None]
    assert len(scaled) == 4
    assert len({each.data_ptr() for each in scaled}) == 1
    tables = [each.cos_sin for each in attention if each.query_factors is None]
    assert len({each.data_ptr() for each in tables}) == 1


@every(
    ("changes", "reason"),
    [
        ({"order": "parallel", "factors": Factors(added=0.5)}, "parallel order has neither factors nor norms"),
        (
            {"order": "parallel", "after": (Norm(48, 1e-6, name="last"),)},
            "parallel order has neither factors nor norms",
        ),
        ({"mixer_factors": Factors(kept=2.0)}, "sequence order multiplies no residual"),
    ],
)
def test_a_layer_that_states_what_its_order_does_not_compute_is_refused(changes: dict[str, Any], reason: str) -> None:
    tree = native("LlamaForCausalLM")
    assert isinstance(tree, blueprint.Decoder)
    layers = tuple(replace(layer, **changes) for layer in tree.stack.layers)
    with pytest.raises(InternalError, match=f"model.layers.0: a layer in {reason}"):
        built(replace(tree, stack=replace(tree.stack, layers=layers)))
