"""Checkpoints of compressed-tensors with several groups of layers, written here by the descriptions of the formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from mixed_weights import Group, config_of, of_floats, of_int8, of_integers, write_mixed
from models_small import built, expected_logits, our_logits, tokens_of
from planned_sizes import planned_bytes
from recurrent_small import recurrent_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.quantization.layers.blocks import GGUFExperts
from srv.quantization.layers.fp8 import Fp8Experts
from srv.quantization.registry import detect, find, method_of, unsupported_form
from srv.testing.engine import user_input

MLP, ATTENTION = r"re:.*mlp.*", r"re:.*self_attn.*"
FOUR, EIGHT, FLOATS, INT8 = of_integers(), of_integers(bits=8), of_floats(), of_int8()


def ops_of(model: Any) -> dict[str, str]:
    """The op of each fused linear layer of the first decoder layer, by its first name."""
    ops = ((next(iter(layer.output_sizes)), layer.op) for layer in model.modules() if hasattr(layer, "output_sizes"))
    return {name.removeprefix("model.layers.0."): op for name, op in ops if ".layers.0." in name}


@every(
    ("groups", "layers", "form", "expected"),
    [
        (
            {(MLP,): FOUR, (ATTENTION,): FLOATS},
            {"mlp": FOUR, "self_attn": FLOATS},
            "mixed-precision",
            ("linear_gguf", "linear_fp8"),
        ),
        # The class of all linear layers comes last, whatever the order of groups.
        (
            {("Linear",): FLOATS, (r"re:.*down_proj$",): EIGHT, (r"re:.*mlp.*",): FOUR},
            {"down_proj": EIGHT, "mlp": FOUR, "self_attn": FLOATS},
            "mixed-precision",
            ("linear_fp8", "linear_gguf"),
        ),
        # A name comes before patterns, and these are in alphabetical order: "re:.*m" before "re:.*p".
        (
            {(r"re:.*proj",): EIGHT, (r"re:.*mlp.*",): FOUR, ("model.layers.0.mlp.down_proj", "Linear"): EIGHT},
            {r"layers\.0\.mlp\.down_proj": EIGHT, "mlp": FOUR, "self_attn": EIGHT},
            "pack-quantized",
            ("linear_gguf", "linear_gguf"),
        ),
        (
            {(MLP,): of_floats("block", block_structure=[32, 32]), (ATTENTION,): FLOATS},
            {"mlp": of_floats("block", block_structure=[32, 32]), "self_attn": FLOATS},
            "float-quantized",
            ("linear_fp8", "linear_fp8"),
        ),
        # One group, of some layers.
        ({(MLP,): FOUR}, {"mlp": FOUR}, "pack-quantized", ("linear_gguf", "linear")),
    ],
)
def test_each_layer_has_the_scheme_of_its_group(
    groups: Mapping[tuple[str, ...], Group],
    layers: Mapping[str, Group],
    form: str,
    expected: tuple[str, str],
    tmp_path: Path,
) -> None:
    """Logits are those of the dequantized weights, and the plan has the bytes that are loaded."""
    model = write_mixed(tmp_path, layers, config_of(groups, form))
    facts, tokens = read_facts(tmp_path), tokens_of(model, 12)
    assert facts.quantization == "compressed-tensors"
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    ours = built(tmp_path)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    method, ops = method_of(facts), ops_of(ours)
    assert method is not None
    assert ours.loaded_bytes() == planned_bytes(tmp_path)
    assert {ops["mlp.down_proj"], ops["self_attn.q_proj"]} == set(expected)
    assert set(method.ops) == set(expected) - {"linear"}
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)]))
    assert plan.refusals == ()


def test_int8_activations_beside_other_schemes(tmp_path: Path) -> None:
    """Int8 weights are multiplied by int8 activations: logits are less exact than those of the other schemes."""
    groups = {(r"re:.*down_proj",): FOUR, (r"re:.*(gate|up)_proj",): FLOATS, (ATTENTION,): INT8}
    layers = {"down_proj": FOUR, "mlp": FLOATS, "self_attn": INT8}
    model = write_mixed(tmp_path, layers, config_of(groups))
    facts, tokens = read_facts(tmp_path), tokens_of(model, 12)
    ours, method = built(tmp_path), method_of(facts)
    expected = expected_logits(model, tokens)
    difference = our_logits(ours, tokens) - expected
    assert 0.001 < float(difference.square().mean().sqrt() / expected.std()) < 0.1
    assert method is not None
    assert method.ops == ("linear_gguf", "linear_fp8", "linear_w8a8")
    assert "activations" in method.note
    assert ours.loaded_bytes() == planned_bytes(tmp_path)


EXPERT_SIZES: dict[str, Any] = {"moe_intermediate_size": 32, "num_hidden_layers": 2}


@every(("group", "kind"), [(FOUR, GGUFExperts), (FLOATS, Fp8Experts)])
def test_experts_have_the_scheme_of_their_group(group: Group, kind: type, tmp_path: Path) -> None:
    other = FLOATS if group is FOUR else EIGHT
    config = config_of({(r"re:.*mlp\.experts.*",): group, (ATTENTION,): other})
    model = write_mixed(tmp_path, {"experts": group, "self_attn": other}, config, kind="qwen3_moe", **EXPERT_SIZES)
    ours, tokens = built(tmp_path), tokens_of(model, 12)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert len([module for module in ours.modules() if isinstance(module, kind)]) == 2
    assert ours.loaded_bytes() == planned_bytes(tmp_path)


@every("group", [FOUR, FLOATS])
def test_experts_without_a_gate_have_the_scheme_of_their_group(group: Group, tmp_path: Path) -> None:
    """Beside another group, whose layers are none of theirs."""
    other = FLOATS if group is FOUR else EIGHT
    config = config_of({(r"re:.*\.experts\..*",): group, (r"re:.*\.[qkv]_proj",): other})
    fields = {**EXPERT_SIZES, "hybrid_override_pattern": "ME*E"}
    layers = {r"\.experts\.": group, r"\.[qkv]_proj": other}
    model = write_mixed(tmp_path, layers, config, kind="nemotron_h", **fields)
    ours, facts, tokens = built(tmp_path), read_facts(tmp_path), tokens_of(model, 12)
    got = recurrent_logits(ours, facts, tokens)
    torch.testing.assert_close(got, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    kind = GGUFExperts if group is FOUR else Fp8Experts
    assert len([module for module in ours.modules() if isinstance(module, kind)]) == 2
    assert ours.loaded_bytes() == planned_bytes(tmp_path)


def test_patterns_fit_the_names_in_the_files_as_well(tmp_path: Path) -> None:
    """Files of Mixtral have other names than the layers of its class in transformers."""
    groups: dict[tuple[str, ...], Group] = {(r"re:.*block_sparse_moe\.experts\.\d+\.w\d$",): EIGHT, ("Linear",): FLOATS}
    config = config_of(groups, ignore=("lm_head", r"re:.*gate$"))
    model = write_mixed(tmp_path, {"experts": EIGHT, "self_attn": FLOATS}, config, kind="mixtral", num_hidden_layers=2)
    tokens = tokens_of(model, 12)
    ours = our_logits(built(tmp_path), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


@every(
    ("groups", "layers", "kind", "part"),
    [
        (
            {(r"re:.*[qv]_proj",): FOUR, (r"re:.*k_proj",): EIGHT},
            {"[qv]_proj": FOUR, "k_proj": EIGHT},
            "llama",
            r"share one input, .*0.self_attn.q_proj is of group_0 and .*0.self_attn.k_proj is of group_1",
        ),
        (
            {(r"re:.*gate_proj",): FOUR, (ATTENTION,): FLOATS},
            {"gate_proj": FOUR, "self_attn": FLOATS},
            "llama",
            r"0.mlp.gate_proj is of group_0 and .*0.mlp.up_proj is not quantized",
        ),
        (
            {(r"re:.*(gate|up)_proj",): FOUR, (r"re:.*down_proj",): EIGHT},
            {"(gate|up)_proj": FOUR, "down_proj": EIGHT},
            "qwen3_moe",
            r"of the experts of one layer, .*gate_proj is of group_0 and .*down_proj is of group_1",
        ),
        (
            {(MLP,): FOUR, (r"re:.*o_proj",): FLOATS},
            {"mlp": FLOATS, "o_proj": FLOATS},
            "llama",
            r"0.mlp.gate_proj are stored as FP8, and its group_0 states packed integers",
        ),
        (
            {(MLP,): FOUR, (r"re:.*o_proj",): FLOATS},
            {"mlp": FOUR, "self_attn": FLOATS},
            "llama",
            r"q_proj are stored as FP8, and no group has it as a target",
        ),
    ],
)
def test_a_plan_refuses_the_layers_that_a_launch_refuses(
    groups: Mapping[tuple[str, ...], Group], layers: Mapping[str, Group], kind: str, part: str, tmp_path: Path
) -> None:
    fields: dict[str, Any] = EXPERT_SIZES if kind == "qwen3_moe" else {"num_hidden_layers": 1}
    write_mixed(tmp_path, layers, config_of(groups), kind=kind, **fields)
    with pytest.raises(ModelError, match=part) as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_quantization"
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals
    assert [re.search(part, entry.reason) is not None for entry in refusals] == [True], refusals


NVFP4 = {"weights": {"num_bits": 4, "type": "float"}, "format": "nvfp4-pack-quantized"}


@every(
    ("change", "part"),
    [
        (
            lambda config: config["config_groups"]["group_1"].update(NVFP4),
            "its group_1 has the format nvfp4-pack-quantized, not pack-quantized, float-quantized or int-quantized",
        ),
        (
            lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=3),
            "its group_0 has weights of 3 bits",
        ),
        (lambda config: config["config_groups"]["group_1"].pop("weights"), "its group_1 has no weights"),
        (lambda config: config["config_groups"]["group_1"].update(targets=5), "targets is 5, not a list of names"),
        (lambda config: config["config_groups"]["group_1"].update(targets=["re:(("]), "not a regular expression"),
        (
            lambda config: config["config_groups"]["group_1"].update(targets=["re:(?!x)"]),
            "its group_1 has the target 're:(?!x)', which needs backtracking",
        ),
        (
            lambda config: config["config_groups"]["group_1"].update(targets=[MLP]),
            "its group_0 and its group_1 both have the target",
        ),
        (lambda config: config.update(ignore=["re:(("]), "ignore has 're:(('"),
        (lambda config: config.update(transform_config={"u": 1}), "transform_config"),
        (lambda config: config.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (lambda config: config.update(kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(
    change: Callable[[dict[str, Any]], Any], part: str, tmp_path: Path
) -> None:
    quant_config = config_of({(MLP,): FOUR, (ATTENTION,): FLOATS})
    change(quant_config)
    config = {"quantization_config": quant_config}
    clause = unsupported_form(tmp_path, config)
    assert clause is not None
    assert part in clause
    assert detect(tmp_path, config) == "compressed-tensors"


def test_a_group_without_a_format_has_that_of_its_weights(tmp_path: Path) -> None:
    """In a mixed configuration; in others, the format is that of the configuration."""
    quant_config = config_of({(MLP,): FOUR, (ATTENTION,): FLOATS, (r"re:lm_head",): INT8})
    for group in quant_config["config_groups"].values():
        del group["format"]
    assert detect(tmp_path, {"quantization_config": quant_config}) == "compressed-tensors"
    assert unsupported_form(tmp_path, {"quantization_config": quant_config}) != ""
    write_mixed(tmp_path, {"mlp": FOUR, "self_attn": FLOATS}, quant_config, num_hidden_layers=1)
    assert built(tmp_path).loaded_bytes()
    naive = config_of({(MLP,): INT8, (ATTENTION,): FLOATS}, "naive-quantized")
    write_mixed(tmp_path / "naive", {"mlp": INT8, "self_attn": FLOATS}, naive, num_hidden_layers=1)
    assert set(ops_of(built(tmp_path / "naive")).values()) == {"linear_w8a8", "linear_fp8"}


def test_a_model_without_weights_follows_its_configuration(tmp_path: Path) -> None:
    """Random weights; ignored layers and those of no group are not quantized."""
    ignore = ("lm_head", "model.layers.1.mlp.down_proj")
    write_mixed(tmp_path, {}, config_of({(MLP,): FOUR, (r"re:.*o_proj",): FLOATS}, ignore=ignore), num_hidden_layers=2)
    (tmp_path / "model.safetensors").unlink()
    ours = built(tmp_path, load_format="dummy")
    ops = ops_of(ours)
    assert [ops[f"{name}_proj"] for name in ("self_attn.q", "self_attn.o", "mlp.down")] == [
        "linear",
        "linear_fp8",
        "linear_gguf",
    ]
    others = [
        layer.op for layer in ours.modules() if "model.layers.1.mlp.down_proj" in getattr(layer, "output_sizes", ())
    ]
    assert others == ["linear"]


def test_a_damaged_layer_is_refused_by_name(tmp_path: Path) -> None:
    """By a plan as well."""
    layers = {"up_proj|gate_proj": FOUR, "self_attn": FLOATS, "down_proj": INT8}
    targets = {(r"re:.*(gate|up)_proj",): FOUR, (ATTENTION,): FLOATS, (r"re:.*down_proj",): INT8}
    write_mixed(tmp_path, layers, config_of(targets))
    stored: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    damage: tuple[tuple[str, Tensor | None, str], ...] = (
        ("mlp.up_proj.weight_scale", None, "missing_tensors"),
        ("mlp.up_proj.weight_packed", None, "missing_tensors"),
        ("self_attn.o_proj.weight_scale", None, "missing_tensors"),
        ("self_attn.o_proj.weight", None, "missing_tensors"),
        ("self_attn.o_proj.weight", torch.zeros(64, 64).to(torch.float8_e5m2), "dtype_mismatch"),
        ("mlp.down_proj.weight_scale", None, "missing_tensors"),
        ("mlp.down_proj.weight", None, "missing_tensors"),
        ("mlp.down_proj.weight_scale", torch.ones(3, 1), "shape_mismatch"),
    )
    for suffix, tensor, code in damage:
        name = f"model.layers.0.{suffix}"
        changed = {**stored, name: tensor}
        save_file({key: kept for key, kept in changed.items() if kept is not None}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=re.escape(name)) as caught:
            built(tmp_path)
        assert caught.value.code == code
        refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals
        assert [(refusal.code, caught.value.reason in refusal.reason) for refusal in refusals] == [(code, True)], (
            refusals
        )


def test_a_single_scheme_stays_with_its_method(tmp_path: Path) -> None:
    for groups, form, name in (
        ({("Linear",): FOUR}, "pack-quantized", "compressed-tensors"),
        ({("Linear",): FLOATS}, "float-quantized", "fp8"),
        ({(MLP,): FLOATS, (ATTENTION,): of_floats("tensor")}, "float-quantized", "fp8"),
        ({("Linear",): INT8}, "int-quantized", "w8a8_int8"),
    ):
        assert detect(tmp_path, {"quantization_config": config_of(groups, form)}) == name
    method = find("compressed-tensors")
    assert method is not None
    assert method.ops == ("linear_gguf",)


def test_a_platform_without_the_ops_of_one_group_refuses(tmp_path: Path) -> None:
    write_mixed(tmp_path, {"mlp": FOUR, "self_attn": FLOATS}, config_of({(MLP,): FOUR, (ATTENTION,): FLOATS}))
    plan = make_plan(user_input(["--model-path", str(tmp_path), "--device", "npu:a2"]))
    assert any(
        "does not support weights quantized with compressed-tensors" in refusal.reason for refusal in plan.refusals
    )
