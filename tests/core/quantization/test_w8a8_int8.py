"""Checkpoints of w8a8_int8, and unquantized checkpoints that are quantized online."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from args_world import model
from every import every
from models_small import (
    HOST,
    built,
    edit_config,
    edit_weights,
    expected_logits,
    our_logits,
    refused,
    small_model,
    tokens_of,
    write_gguf,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.models.read import read_facts
from srv.quantization.formats.int8_weights import read_description
from srv.quantization.formats.online_storage import quantize_int8
from srv.quantization.layers.int8 import DynamicInt8Linear, Int8Experts
from srv.quantization.method import StoredModel
from srv.quantization.registry import detect

QUANT_ARGS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "observer": "minmax"}
MOE_PARTS = ("experts", "shared.gate_up_proj", "shared.down_proj")
LIMIT = 0.1  # in standard deviations of the logits: int8 random weights and activations, three layers of size 48
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**QUANT_ARGS, "strategy": "channel", "dynamic": False},
            "input_activations": {**QUANT_ARGS, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
}


def saved(folder: Path, arch: str = "llama", **fields: Any) -> Any:
    """An unquantized random model on disk, in float32."""
    model = small_model(arch, **fields)
    model.save_pretrained(folder)
    return model


def quantize(folder: Path, with_config: bool = True, flat: bool = False, dtype: torch.dtype = torch.float32) -> None:
    """Quantize the projections of a folder to int8 in the format of the method. `flat`: scales have the shape [out]."""
    path = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight"):
            stored[name], scale = quantize_int8(tensor)
            stored[f"{name}_scale"] = (scale[:, 0].contiguous() if flat else scale).to(dtype)
        else:
            stored[name] = tensor
    save_file(stored, path)
    if with_config:
        edit_config(folder, quantization_config=QUANTIZATION_CONFIG)


def logits(folder: Path, tokens: Tensor, **options: Any) -> Tensor:
    return our_logits(built(folder, **options), tokens)


def distance(model: Any, ours: Tensor, tokens: Tensor) -> float:
    """The root mean square difference, in standard deviations of the unquantized model's logits."""
    plain = expected_logits(model, tokens)
    return float((ours - plain).square().mean().sqrt() / plain.std())


@every("arch", ["llama", "qwen2", "qwen3"])
def test_online_quantization_equals_a_checkpoint_and_is_near_the_unquantized_model(arch: str, tmp_path: Path) -> None:
    model = saved(tmp_path, arch)
    tokens = tokens_of(model, 12)
    online = logits(tmp_path, tokens, online_quantization="int8dq")
    assert 0.001 < distance(model, online, tokens) < LIMIT
    quantize(tmp_path)
    assert torch.equal(logits(tmp_path, tokens), online)


@every("flat", [False, True])
def test_scales_of_either_shape_without_a_quantization_config(flat: bool, tmp_path: Path) -> None:
    model = saved(tmp_path)
    tokens = tokens_of(model, 12)
    online = logits(tmp_path, tokens, online_quantization="int8dq")
    quantize(tmp_path, with_config=False, flat=flat)
    assert read_facts(tmp_path).quantization is None
    assert torch.equal(logits(tmp_path, tokens, quantization="w8a8_int8"), online)


def test_scales_of_16_bits_are_widened(tmp_path: Path) -> None:
    model = saved(tmp_path)
    tokens = tokens_of(model, 12)
    quantize(tmp_path, dtype=torch.bfloat16)
    assert distance(model, logits(tmp_path, tokens), tokens) < LIMIT


def test_the_facts_count_int8_weights_and_name_the_method(tmp_path: Path) -> None:
    model = saved(tmp_path)
    plain = read_facts(tmp_path)
    quantize(tmp_path)
    facts = read_facts(tmp_path)
    weights = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight"))
    assert (plain.quantization, plain.stored_types) == (None, {"float32": plain.parameters})
    assert (facts.quantization, facts.stored_types["int8"], facts.dtype) == ("w8a8_int8", weights, "float32")


def test_embeddings_and_the_output_layer_stay_unquantized(tmp_path: Path) -> None:
    saved(tmp_path)
    for options in ({"online_quantization": "int8wo"}, {}):
        kinds = {name: type(module).__name__ for name, module in built(tmp_path, **options).named_modules()}
        int8_class = "WeightOnlyInt8Linear" if options else "DynamicInt8Linear"
        assert kinds["layers.0.attention.qkv_proj"] == kinds["layers.2.mlp.down_proj"] == int8_class
        assert (kinds["lm_head"], kinds["embedding"]) == ("Linear", "Embedding")
        if options:
            quantize(tmp_path)


@every("arch", ["llama", "qwen2", "qwen3"])
def test_weight_only_int8_is_nearer_to_the_unquantized_model(arch: str, tmp_path: Path) -> None:
    model = saved(tmp_path, arch)
    tokens = tokens_of(model, 12)
    both, weights = (
        distance(model, logits(tmp_path, tokens, online_quantization=mode), tokens) for mode in ("int8dq", "int8wo")
    )
    assert 0.001 < weights < both < LIMIT


def test_weight_only_int8_equals_its_dequantized_weights(tmp_path: Path) -> None:
    """The result equals that of unquantized layers with the rounded weights."""
    model = saved(tmp_path, "qwen2")
    tokens = tokens_of(model, 12)
    ours = logits(tmp_path, tokens, online_quantization="int8wo")
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            integers, scale = quantize_int8(parameter.detach())
            parameter.data = integers * scale
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=5e-4, rtol=1e-4)


def test_a_tied_output_layer_stays_unquantized(tmp_path: Path) -> None:
    model = saved(tmp_path, tie_word_embeddings=True)
    tokens = tokens_of(model, 12)
    assert 0.001 < distance(model, logits(tmp_path, tokens, online_quantization="int8dq"), tokens) < LIMIT


def test_quantization_maps_the_largest_of_each_row_to_127() -> None:
    weight = torch.tensor([[0.5, -127.0, 1.5], [0.0, 0.0, 0.0], [2.0, 4.0, -1.0]])
    integers, scale = quantize_int8(weight)
    assert integers.tolist() == [[0, -127, 2], [0, 0, 0], [64, 127, -32]]
    assert scale.tolist() == [[1.0], [0.0], [pytest.approx(4 / 127)]]


def test_dummy_weights_follow_the_quantization_config(tmp_path: Path) -> None:
    saved(tmp_path)
    ignored = ["lm_head", "re:model.layers.1.mlp.*", "model.layers.2.mlp.down_proj"]
    edit_config(tmp_path, quantization_config={**QUANTIZATION_CONFIG, "ignore": ignored})
    (tmp_path / "model.safetensors").unlink()
    layers = built(tmp_path, load_format="dummy")
    int8_layers = {name for name, module in layers.named_modules() if isinstance(module, DynamicInt8Linear)}
    assert "layers.1.attention.qkv_proj" in int8_layers
    assert "layers.0.mlp.down_proj" in int8_layers
    assert not int8_layers & {
        "lm_head",
        "layers.1.mlp.gate_up_proj",
        "layers.1.mlp.down_proj",
        "layers.2.mlp.down_proj",
    }


def test_dummy_experts_are_int8_unless_they_are_ignored(tmp_path: Path) -> None:
    """Those that all tokens use as well; routers and gates stay as they are."""
    saved(tmp_path, "qwen2_moe")
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config={**QUANTIZATION_CONFIG, "ignore": ["lm_head", r"re:.*\.2\.mlp\..*"]})
    layers = built(tmp_path, load_format="dummy")
    names = {name for name, module in layers.named_modules() if isinstance(module, (DynamicInt8Linear, Int8Experts))}
    mlp = {f"layers.{index}.mlp.{part}" for index in (0, 1) for part in MOE_PARTS}
    assert {name for name in names if ".mlp." in name} == mlp


def test_a_configuration_declares_the_linear_layers_of_every_kind_of_attention() -> None:
    described = read_description(StoredModel(model(config={}), {}))
    prefix = "model.layers.0"
    latent = (f"{prefix}.self_attn.q_a_proj", f"{prefix}.self_attn.kv_a_proj_with_mqa")
    recurrent = (f"{prefix}.linear_attn.in_proj_qkvz", f"{prefix}.linear_attn.in_proj_ba")
    for names in (latent, recurrent, (f"{prefix}.mlp.experts.3.up_proj",), (f"{prefix}.mlp.shared_experts.down_proj",)):
        assert described.quant_type(names) == "int8"
    for name in ("lm_head", f"{prefix}.mlp.gate", f"{prefix}.self_attn.kv_b_proj", f"{prefix}.mlp.shared_expert_gate"):
        assert described.quant_type((name,)) == "FLOAT"


def changed(**fields: Any) -> dict[str, Any]:
    """QUANTIZATION_CONFIG with changed entries: its own, or those of a section of its group (weights__num_bits)."""
    config = copy.deepcopy(QUANTIZATION_CONFIG)
    for name, value in fields.items():
        section, _, key = name.partition("__")
        if key:
            config["config_groups"]["group_0"][section][key] = value
        elif name in config["config_groups"]["group_0"]:
            config["config_groups"]["group_0"][name] = value
        else:
            config[name] = value
    return config


@every(
    ("fields", "reason"),
    [
        ({"format": "float-quantized"}, "its group_0 has weights of 8 bits of type int, not FP8"),
        ({"format": "pack-quantized"}, "its group_0 quantizes activations as well"),
        ({"weights__num_bits": 4}, "group_0 has weights with num_bits 4, not 8"),
        ({"weights__type": "float"}, "weights with type float, not int"),
        ({"weights__strategy": "group"}, "weights with strategy group, not channel or tensor"),
        ({"weights__symmetric": False}, "weights with symmetric False, not True"),
        ({"weights": None}, "group_0 has no weights"),
        ({"input_activations__num_bits": 4}, "input_activations with num_bits 4, not 8"),
        ({"input_activations__dynamic": False}, "input_activations with strategy token, not tensor"),
        ({"input_activations__dynamic": "local"}, "input_activations with strategy token, not tensor"),
        ({"input_activations__strategy": "tensor"}, "input_activations with strategy tensor, not token"),
        ({"output_activations": QUANT_ARGS}, "quantizes the outputs of layers as well (output_activations)"),
        ({"kv_cache_scheme": QUANT_ARGS}, "it has a kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "it has a transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse, in the format sparse-24-bitmask"),
        ({"config_groups": {}}, "it has no config_groups"),
        ({"ignore": ["re:(("]}, "its ignore has 're:((', which is not a regular expression"),
    ],
)
def test_other_compressed_tensors_schemes_are_refused_with_a_reason(fields: Any, reason: str, tmp_path: Path) -> None:
    saved(tmp_path)
    quantize(tmp_path)
    edit_config(tmp_path, quantization_config=changed(**fields))
    assert read_facts(tmp_path).quantization == "compressed-tensors"
    error = refused(tmp_path)
    assert error.code == "unsupported_quantization"
    assert reason in error.reason
    assert "w8a8_int8" in error.remedy


def test_equivalent_configurations_select_the_method(tmp_path: Path) -> None:
    for config in (
        QUANTIZATION_CONFIG,
        changed(sparsity_config={"format": "dense"}, sparsity={}),
        {"quant_method": "w8a8_int8"},
    ):
        assert detect(tmp_path, {"quantization_config": config}) == "w8a8_int8"
    assert detect(tmp_path, {"quantization_config": {"quant_method": "awq"}}) == "awq"
    assert detect(tmp_path, {"quantization_config": {}}) == "unknown"
    assert detect(tmp_path, {}) is None


def test_quantized_weights_are_not_quantized_again(tmp_path: Path) -> None:
    model = saved(tmp_path)
    quantize(tmp_path)
    error = refused(tmp_path, online_quantization="int8dq")
    assert (error.code, "w8a8_int8" in error.reason) == ("unsupported_quantization", True)
    edit_config(tmp_path, quantization_config=None)
    assert "quantized already (int8)" in refused(tmp_path, online_quantization="int8dq").reason
    write_gguf(tmp_path / "model.gguf", model, "llama")
    assert "gguf" in refused(tmp_path / "model.gguf", online_quantization="int8dq").reason


@every("number", [torch.nan, torch.inf])
def test_a_layer_with_a_scale_that_is_not_finite_is_refused_by_name(number: float, tmp_path: Path) -> None:
    saved(tmp_path, "qwen2_moe")
    quantize(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("model.layers.0.self_attn.o_proj.weight_scale", "model.layers.1.mlp.experts.2.up_proj.weight_scale"):
        scales = stored[name].clone()
        scales[3] = number
        save_file({**stored, name: scales}, tmp_path / "model.safetensors")
        error = refused(tmp_path)
        assert (error.code, name in error.reason) == ("damaged", True)


def test_a_layer_without_its_scale_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    quantize(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    edit_weights(tmp_path, **{name: None})
    error = refused(tmp_path)
    assert (error.code, name in error.reason) == ("missing_tensors", True)


def test_the_transformers_implementation_quantizes_nothing_at_load(tmp_path: Path) -> None:
    saved(tmp_path)
    error = refused(tmp_path, impl="transformers", online_quantization="int8dq")
    assert (error.code, "would be quantized with int8dq at load" in error.reason) == ("unsupported_quantization", True)


def test_dummy_weights_of_online_quantized_layers(tmp_path: Path) -> None:
    model = saved(tmp_path)
    ours = built(tmp_path, load_format="dummy", online_quantization="int8dq")
    linear = next(module for module in ours.modules() if isinstance(module, DynamicInt8Linear))
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(3), device=HOST)
    assert 0.8 < float(linear(x).std()) / (0.02 * model.config.hidden_size**0.5) < 1.25
