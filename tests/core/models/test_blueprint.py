"""The blueprint of a model: layers hold the weights that it names, and what follows from it is one walk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from every import every
from models_small import built
from pooled_models import pooled_model

from srv.models import derive
from srv.models.architectures.encoder_config import EncoderBlueprint
from srv.models.architectures.registry import native_config
from srv.models.base import NativeModel
from srv.models.blueprint import Linear, Part, alike, below, walk
from srv.models.read import read_facts

ENCODERS = (
    "bert scorer",
    "xlm-roberta scorer",
    "modernbert classifier",
    "gte classifier",
    "nomic",
    "jina",
    "distilbert classifier",
    "eurobert",
)
BERT = {"vocab_size": 100, "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3, "num_labels": 5}


def tree(name: str = "BertForSequenceClassification", **fields: object) -> Part:
    config = native_config(name, {**BERT, **fields})
    assert isinstance(config, EncoderBlueprint)
    return config.tree


@every("name", ENCODERS)
def test_layers_hold_the_weights_that_the_blueprint_names(name: str, tmp_path: Path) -> None:
    pooled_model(name, tmp_path)
    facts, model = read_facts(tmp_path), built(tmp_path)
    config = native_config(facts.architecture, facts.config)
    assert isinstance(config, EncoderBlueprint)
    assert isinstance(model, NativeModel)
    named = {
        below(prefix, weight.name): weight.shape for prefix, part in walk(config.tree) for weight in part.weights()
    }
    assert named == {weight: tuple(view.shape) for weight, view in model.weight_views().items()}
    assert model.attention_layers == config.attention_layers


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


def test_a_walk_that_nobody_has_prepared_is_a_few_lines() -> None:
    """As for adapters: the linear layers of each kind, with their sizes, whatever the family."""
    targets: Counter[tuple[str, int, int]] = Counter()
    for _, part in walk(tree(num_hidden_layers=3)):
        if isinstance(part, Linear):
            targets.update((name, part.inputs, outputs) for name, outputs in part.outputs.items())
    square = {(name, 12, 12): 3 for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert targets == {
        **square,
        ("up_proj", 12, 20): 3,
        ("down_proj", 20, 12): 3,
        ("head.dense", 12, 12): 1,
        ("score", 12, 5): 1,
    }
