"""What --init-expert-location says of a model's experts, and what is refused of it, in plans and launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from args_world import user

from srv.cli.plan import to_dict, to_text
from srv.errors import ModelError, Refusal
from srv.models.read import read_facts
from srv.planning.expert_location import ExpertMap, LayerExpertCounts, Mixtures, mixtures_of, read_location
from srv.planning.plan import make_plan
from srv.planning.resolution import resolve_launch

MIXTURES = Mixtures("tiny", (1, 2), 3, 4)  # layers 1 and 2 of three have four experts each
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
MOVED = [[1, 0, 2, 3], [0, 1, 3, 2]]
COUNTED = [[4, 0, 0, 0], [1, 1, 1, 1]]


def read(content: object, redundant: int = 0) -> ExpertMap | LayerExpertCounts:
    return read_location(json.dumps(content), MIXTURES, redundant)


def test_each_expert_has_one_place_or_several() -> None:
    trivial = read_location("trivial", MIXTURES)
    assert trivial == ExpertMap(MIXTURES, ((0, 1, 2, 3),) * 2)
    assert str(trivial) == "4 places for the 4 experts of each of layers 1 to 2, each expert where trivial has it"
    assert read_location("trivial", MIXTURES, 2).places == ((0, 1, 2, 3, 0, 1),) * 2
    moved = read({"physical_to_logical_map": MOVED})
    assert moved == ExpertMap(MIXTURES, ((1, 0, 2, 3), (0, 1, 3, 2)))
    assert (moved.elsewhere, moved.copied) == (4, 0)
    copied = read({"physical_to_logical_map": [[*row, 3] for row in MOVED]}, redundant=1)
    assert (copied.elsewhere, copied.copied) == (4, 2)
    assert "4 experts are not where trivial has them, and 2 have copies" in str(copied)
    of_all = {"physical_to_logical_map": [[], *MOVED]}  # the row of a layer without experts says nothing
    assert read(of_all) == read({"layers": [1, 2], "physical_to_logical_map": MOVED}) == moved


def test_counts_of_several_steps_are_added() -> None:
    """Of SGLang's table for each step, and of the records of srv."""
    once = read({"logical_count": COUNTED})
    assert once == LayerExpertCounts(MIXTURES, ((4, 0, 0, 0), (1, 1, 1, 1)))
    assert (once.total, once.imbalance) == (8, 4.0)
    assert "8 choices among the 4 experts of each of layers 1 to 2, the busiest with 4.0 times" in str(once)
    twice = LayerExpertCounts(MIXTURES, ((8, 0, 0, 0), (2, 2, 2, 2)))
    assert read({"logical_count": [COUNTED, COUNTED]}) == twice
    record = {"last_step": 3, "steps": 1, "tokens": 4, "logical_count": COUNTED}
    about = {"mode": "stat", "recording": True, "layers": [1, 2]}
    assert read({**about, **record}) == once
    assert read({**about, "mode": "per_pass", "passes": [record, record]}) == twice
    assert read({"logical_count": [[0] * 4, *COUNTED]}) == once


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "it needs either physical_to_logical_map or logical_count, and has no fields"),
        ({"counts": []}, "and has counts"),
        ({"physical_to_logical_map": MOVED, "logical_count": COUNTED}, "it needs either"),
        ({"physical_to_logical_map": MOVED, "ranks": 2}, "beside physical_to_logical_map it has ranks"),
        ({"physical_to_logical_map": 3}, "not a list of rows, one for each layer: 3"),
        ({"physical_to_logical_map": [0, 1]}, "not a list of rows"),
        ({"physical_to_logical_map": MOVED[:1]}, "has 1 rows, and tiny needs 2, for layers 1 to 2, or one for each"),
        ({"physical_to_logical_map": [*MOVED] * 2}, "has 4 rows"),
        ({"physical_to_logical_map": MOVED, "layers": [0, 1]}, r"of the layers \[0, 1\], and layers 1 to 2 of tiny"),
        ({"physical_to_logical_map": MOVED[:1], "layers": [1, 2]}, "has 1 rows"),
        ({"physical_to_logical_map": [MOVED[0], [0, 1, 2]]}, "of layer 2 has 3 places, and tiny has 4 experts"),
        ({"physical_to_logical_map": [MOVED[0], [0, 1, 2, 4]]}, "layer 2 has 4 in place 3, and experts are numbered"),
        ({"physical_to_logical_map": [[-1, 1, 2, 3], MOVED[1]]}, "layer 1 has -1 in place 0"),
        ({"physical_to_logical_map": [[0, 1, 2, 3.0], MOVED[1]]}, "layer 1 has 3.0 in place 3"),
        ({"physical_to_logical_map": [[0, True, 2, 3], MOVED[1]]}, "layer 1 has true in place 1"),
        ({"physical_to_logical_map": [MOVED[0], [0, 1, 2, 2]]}, "layer 2 has no place for expert 3"),
        ({"logical_count": COUNTED[:1]}, "has 1 rows"),
        ({"logical_count": []}, "has 0 rows"),
        ({"logical_count": [[1, 2], [3, 4]]}, "layer 1 has 2 experts, and tiny has 4"),
        ({"logical_count": [COUNTED[0], [1, 1, 1, float("nan")]]}, "layer 2 is NaN for expert 3"),
        ({"logical_count": [COUNTED[0], [1, 1, 1, float("inf")]]}, "layer 2 is Infinity for expert 3"),
        ({"logical_count": [COUNTED[0], [1, -1, 1, 1]]}, "layer 2 is -1 for expert 1"),
        ({"logical_count": [COUNTED[0], [1, "2", 1, 1]]}, 'layer 2 is "2" for expert 1'),
        ({"logical_count": [[0] * 4] * 2}, "has no tokens"),
        ({"passes": []}, "has no tokens"),
        ({"passes": [COUNTED]}, "passes is not a list of objects that have logical_count"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(content: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as refused:
        read(content)
    assert refused.value.code == "expert_location"


def test_a_value_that_is_no_placement_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("list.json", "[]"),
        ("text.json", "{"),
        ("binary.json", b"\xff"),
        ("deep.json", "[" * 10**6),
    ):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for value, code, reason in (
        ("random", "not_found", "neither trivial, nor a JSON object, nor a regular file"),
        (str(tmp_path), "not_found", "nor a regular file"),
        ("record.pt", "expert_location", "it is a file of torch.save"),
        ("{", "damaged", "it is not JSON"),
        (str(tmp_path / "list.json"), "expert_location", r"it is \[\], where a JSON object is expected"),
        *((str(tmp_path / f"{name}.json"), "damaged", "it is not JSON") for name in ("text", "binary", "deep")),
    ):
        with pytest.raises(ModelError, match=reason) as refused:
            read_location(value, MIXTURES)
        assert refused.value.code == code
        if value == "record.pt":
            assert "torch.load('record.pt', weights_only=True)" in refused.value.remedy


def arguments(folder: Path, config: dict[str, Any] = CONFIG, **values: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "device": "cpu:avx512",
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        **values,
    }


def test_a_plan_shows_what_was_read_and_a_launch_says_why_it_has_no_effect(tmp_path: Path) -> None:
    values = arguments(tmp_path)
    assert mixtures_of(read_facts(tmp_path), {}) == Mixtures(tmp_path.name, (1, 2), 3, 4)
    plan = make_plan(user(**values))
    assert plan.refusals == ()
    assert "[experts]\ninit_expert_location: 4 places for the 4 experts of each of layers 1 to 2, each" in to_text(plan)
    (tmp_path / "places.json").write_text(json.dumps({"physical_to_logical_map": MOVED}))
    values["init_expert_location"] = str(tmp_path / "places.json")
    moved = user(**values)
    plan = make_plan(moved)
    places = {"places": 4, "elsewhere": 4, "copied": 0}
    assert to_dict(plan)["experts"] == {"layers": [1, 2], "experts": 4, **places}
    with pytest.raises(Refusal) as caught:
        resolve_launch(user(**values | {"device": "cpu"}))  # whatever processor this is
    for (refused,) in (plan.refusals, caught.value.rejections):
        assert (refused.code, refused.what, refused.who) == ("planned", "init_expert_location", "command line")
        assert "other placements are not implemented yet" in refused.reason
        assert "(read: 4 places for the 4 experts of each of layers 1 to 2; 4 experts are not where" in refused.reason
    counted = make_plan(user(**values | {"init_expert_location": json.dumps({"logical_count": COUNTED})}))
    assert to_dict(counted)["experts"] == {"layers": [1, 2], "experts": 4, "choices": 8, "imbalance": 4.0}


def test_a_placement_for_another_model_is_refused_first(tmp_path: Path) -> None:
    values = {"init_expert_location": json.dumps({"physical_to_logical_map": [[0, 1]] * 2})}
    dense = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_experts": 0}
    for config, code, reason in (
        (CONFIG, "expert_location", "layer 1 has 2 places, and"),
        (dense, "inert", "has no experts that native layers compute"),
    ):
        with pytest.raises(Refusal) as caught:
            make_plan(user(**arguments(tmp_path, config, **values)))
        first, second = caught.value.rejections
        assert (first.code, first.what, first.who) == (code, "init_expert_location", "command line")
        assert (reason in first.reason, second.code) == (True, "planned"), first.reason
    for config in (dense, {**CONFIG, "mlp_only_layers": [0, 1, 2]}):
        assert make_plan(user(**arguments(tmp_path, config))).experts is None


def test_redundant_experts_have_places_of_their_own(tmp_path: Path) -> None:
    """As many as a plan can write out; a negative number is refused."""
    for redundant, places in ((2, 6), (10**12, 4 + 2**14)):
        plan = make_plan(user(**arguments(tmp_path, ep_num_redundant_experts=redundant)))
        assert to_dict(plan)["experts"]["places"] == places
    with pytest.raises(Refusal, match="must be at least 0"):
        make_plan(user(**arguments(tmp_path, ep_num_redundant_experts=-100)))
