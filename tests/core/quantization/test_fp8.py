"""Checkpoints with FP8 weights, written here by the formats' descriptions, and weights that become FP8 at load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from fp8_weights import FORMS, Form, compressed, fp8, write_fp8
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError, Rejection
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.formats.fp8 import METHOD
from srv.quantization.formats.online_storage import quantize_fp8
from srv.quantization.layers.fp8 import Fp8Experts, Fp8Linear
from srv.quantization.registry import detect, unsupported_form
from srv.testing.engine import user_input

LAYER = "model.layers.0.self_attn.o_proj"


def planned(folder: Path, **values: Any) -> int:
    return weight_bytes(make_config({"dtype": "float32", **values}), read_facts(folder))


def refusals(folder: Path, *arguments: str) -> tuple[Rejection, ...]:
    """Why a plan says that a launch on processors would end."""
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments])).refusals


@every("kind", FORMS)
def test_logits_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded."""
    form, folder = FORMS[kind], tmp_path / kind
    model = write_fp8(folder, form)
    assert read_facts(folder).quantization == form.method
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned(folder)
    layers = {name for name, module in ours.named_modules() if isinstance(module, Fp8Linear)}
    assert "layers.0.attention.qkv_proj" in layers
    assert "layers.2.mlp.down_proj" in layers
    assert "lm_head" not in layers
    assert refusals(folder) == ()


EXPERTS = {"moe_intermediate_size": 48, "num_hidden_layers": 2}


@every("kind", ["fp8, static", "fp8, blocks", "fp8, blocks that end within layers", "compressed-tensors, channel"])
def test_experts_have_fp8_weights(kind: str, tmp_path: Path) -> None:
    form, folder = FORMS[kind], tmp_path / kind
    model = write_fp8(folder, form, kind="qwen3_moe", **EXPERTS)
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) == 2
    assert ours.loaded_bytes() == planned(folder)
    assert refusals(folder) == ()


def test_scales_of_a_pool_are_left_out(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for name in ("self_attn.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_proj.output_scale"):
            tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)

    form = FORMS["compressed-tensors, channel"]
    assert form.config is not None
    config = {**form.config, "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    model = write_fp8(tmp_path, form._replace(config=config), add)
    tokens = tokens_of(model, 12)
    ours = built(tmp_path)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned(tmp_path)


def test_notes_and_refusals_say_what_fp8_weights_do(tmp_path: Path) -> None:
    """The pool may use the scales of the checkpoint, and products have the backends of the platform."""
    write_fp8(tmp_path, FORMS["compressed-tensors, channel"], num_hidden_layers=1)
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)]))
    assert [note.partition(": ")[2] for note in plan.notes] == [METHOD.note]
    assert "activations in the model's dtype" in METHOD.note
    assert "KV pool" not in METHOD.note
    assert refusals(tmp_path, "--fp8-gemm-backend", "torch_native") == ()


def test_layers_that_are_not_stored_as_fp8_stay_as_they_are(tmp_path: Path) -> None:
    """Whatever the list of the configuration says."""

    def unquantize(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
        del tensors[f"{LAYER}.weight_scale_inv"]

    write_fp8(tmp_path, FORMS["fp8, blocks"], unquantize)
    kinds = {name: type(module).__name__ for name, module in built(tmp_path).named_modules()}
    assert (kinds["layers.0.attention.o_proj"], kinds["layers.1.attention.o_proj"]) == ("Linear", "Fp8Linear")


@every("method", ["--quantization fp8", "--torchao-config fp8wo"])
def test_an_unquantized_checkpoint_becomes_fp8_at_load(method: str, tmp_path: Path) -> None:
    model = small_model("qwen3")
    folder = tmp_path / method.rpartition(" ")[2]
    model.save_pretrained(folder)
    tokens = tokens_of(model, 12)
    argument, _, value = method.partition(" ")
    ours = built(folder, **{"quantization" if argument == "--quantization" else "online_quantization": value})
    assert ours.loaded_bytes() == planned(folder, **{argument[2:].replace("-", "_"): value})
    logits = our_logits(ours, tokens)
    plain = expected_logits(model, tokens)
    distance = float((logits - plain).square().mean().sqrt() / plain.std())
    assert 0.001 < distance < 0.3  # a weight is rounded to four bits of significand
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            values, scale = quantize_fp8(parameter.detach())
            parameter.data = values.float() * scale
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert refusals(folder, argument, value) == ()


def test_experts_become_fp8_at_load(tmp_path: Path) -> None:
    small_model("qwen2_moe").save_pretrained(tmp_path)
    ours = built(tmp_path, quantization="fp8")
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) > 0
    assert ours.loaded_bytes() == planned(tmp_path, quantization="fp8")


def test_quantization_maps_the_largest_of_each_row_to_448() -> None:
    weight = torch.tensor([[0.5, -448.0, 1.75], [0.0, 0.0, 0.0], [2.0, 4.0, -1.0]])
    values, scale = quantize_fp8(weight)
    assert values.float().tolist() == [[0.5, -448.0, 1.75], [0, 0, 0], [224, 448, -112]]
    assert scale.tolist() == [[1.0], [0.0], [pytest.approx(4 / 448)]]


@every("kind", ["fp8, blocks", "compressed-tensors, channel"])
def test_dummy_weights_follow_the_configuration(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / kind
    small_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    name = "ignore" if "tensors" in kind else "modules_to_not_convert"
    config = {**(FORMS[kind].config or {}), name: ["lm_head", "model.layers.1", "re:.*layers.2.*down_proj"]}
    edit_config(folder, quantization_config=config)
    ours = built(folder, load_format="dummy")
    layers = {name for name, module in ours.named_modules() if isinstance(module, Fp8Linear)}
    assert {"layers.0.attention.qkv_proj", "layers.2.mlp.gate_up_proj"} <= layers
    assert not {name for name in layers if ".1." in name or name.endswith("2.mlp.down_proj") or name == "lm_head"}
    linear = next(module for module in ours.modules() if isinstance(module, Fp8Linear))
    x = torch.randn(5, linear.inputs, generator=torch.Generator().manual_seed(3))
    assert 0.8 < float(linear(x).std()) / (0.02 * linear.inputs**0.5) < 1.25


def _change(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        name = f"{LAYER}.{suffix}"
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    return spoil


def _with(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def _nan(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8)[3, 5] = 0xFF
    return tensor


BLOCKS, STATIC = FORMS["fp8, blocks"], FORMS["fp8, static"]
INVERSE = "weight_scale_inv"
DAMAGED: list[tuple[Form, Callable[[dict[str, Tensor]], None], str, str, bool]] = [
    (BLOCKS, _change(INVERSE, lambda scale: None), "missing_tensors", f"{LAYER}.weight_scale", True),
    (BLOCKS, _change("weight", lambda weight: None), "missing_tensors", f"lacks {LAYER}.weight, which", True),
    (BLOCKS, _change(INVERSE, lambda scale: scale[:-1]), "shape_mismatch", f"{LAYER}.weight_scale_inv", True),
    (BLOCKS, _change(INVERSE, lambda scale: scale.int()), "dtype_mismatch", "stored as int32", True),
    (BLOCKS, _change("weight", lambda weight: weight.view(torch.int8)), "unsupported_quantization", "as int8", True),
    (
        BLOCKS,
        _change("weight", lambda weight: weight.float().to(torch.float8_e5m2)),
        "unsupported_quantization",
        "float8_e5m2, not as float8_e4m3fn",
        True,
    ),
    (STATIC, _change("weight", lambda weight: weight[0]), "shape_mismatch", "shape [64], which is no matrix", True),
    (STATIC, _change("weight_scale", lambda scale: torch.ones(3)), "shape_mismatch", "one per output, or one", True),
    (STATIC._replace(config=fp8((32, 32))), lambda tensors: None, "shape_mismatch", "blocks of 32 x 32", True),
    (BLOCKS._replace(config=fp8()), lambda tensors: None, "shape_mismatch", "one per output, or one", True),
    (BLOCKS, _change(INVERSE, _with(math.nan)), "damaged", "has the value nan", False),
    (BLOCKS, _change(INVERSE, _with(math.inf)), "damaged", "has the value inf", False),
    (BLOCKS, _change(INVERSE, _with(3e38)), "damaged", "3e+38, by which a weight of 448 overflows", False),
    (STATIC, _change("weight_scale", _with(-1.0)), "damaged", "has the value -1", False),
    (STATIC, _change("input_scale", _with(math.nan)), "damaged", f"{LAYER}.input_scale", False),
    (BLOCKS, _change("weight", _nan), "damaged", "values that are NaN", False),
]


@every(("form", "spoil", "code", "part", "in_headers"), DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_name(
    form: Form, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, in_headers: bool, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write_fp8(folder, form, spoil, num_hidden_layers=1)
    with pytest.raises(ModelError) as caught:
        built(folder)
    assert (caught.value.code, part in str(caught.value)) == (code, True), caught.value
    assert "model.layers.0." in str(caught.value)
    if in_headers:
        refused = refusals(folder)
        assert [part in refusal.reason for refusal in refused] == [True], refused


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, BLOCKS, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "truncated"


def test_layers_that_share_an_input_must_be_quantized_alike(tmp_path: Path) -> None:
    def unquantize(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 64, dtype=torch.bfloat16)

    write_fp8(tmp_path, STATIC, unquantize)
    with pytest.raises(ModelError, match=r"q_proj is FP8 and .*k_proj is not"):
        built(tmp_path)


def in_group(**fields: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with other fields in its group of layers."""
    config = compressed("channel")
    ((name, group),) = config["config_groups"].items()
    return {**config, "config_groups": {name: {**group, **fields}}}


@every(
    ("config", "part"),
    [
        (fp8(fmt="e5m2"), "e5m2"),
        (fp8((128, 48)), "128 x 48, not sizes up to 1048576, the inputs a multiple of 32"),
        (fp8(expert_dtype="fp4"), "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        (compressed("group", group_size=128), "scales per group"),
        (compressed("tensor", num_bits=4), "4 bits of type float"),
        (compressed("channel", symmetric=False), "zero points"),
        ({**compressed("channel"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**compressed("channel"), "transform_config": {"u": 1}}, "transform_config"),
        ({**compressed("channel"), "ignore": ["re:(("]}, "ignore has 're:((', which is not a regular expression"),
        (compressed("block", block_structure=[128]), "its blocks are [128], not a number of outputs and one of inputs"),
        (compressed("block", block_structure="axb"), "its blocks are 'axb'"),
        (in_group(weights=None), "has no weights"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(config: dict[str, Any], part: str, tmp_path: Path) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    small_model("llama", num_hidden_layers=1).save_pretrained(folder)
    edit_config(folder, quantization_config=config)
    clause = unsupported_form(folder, {"quantization_config": config})
    assert clause is not None
    assert part in clause
    assert detect(folder, {"quantization_config": config}) == config["quant_method"]
    with pytest.raises(ModelError, match=re.escape(part)) as caught:
        built(folder)
    assert caught.value.code == "unsupported_quantization"
    refused = refusals(folder)
    assert [part in refusal.reason for refusal in refused] == [True], refused


def test_a_form_that_no_method_recognises_is_refused_by_plan_and_launch(tmp_path: Path) -> None:
    small_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config=in_group(format="int-quantized"))
    part = "its weights are quantized with compressed-tensors, which srv does not load yet"
    with pytest.raises(ModelError, match=part):
        built(tmp_path)
    assert [part in refusal.reason for refusal in refusals(tmp_path)] == [True]


def test_fp8_weights_are_never_widened_without_their_scales(tmp_path: Path) -> None:
    """The configuration names no method; the user may."""
    model = write_fp8(tmp_path, STATIC._replace(config=None))
    with pytest.raises(ModelError, match="names no quantization method") as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_quantization"
    refused = refusals(tmp_path)
    assert any("names no quantization method" in refusal.reason for refusal in refused), refused
    tokens = tokens_of(model, 12)
    ours = built(tmp_path, quantization="fp8")
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


def test_an_embedding_in_fp8_is_refused(tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        name = "model.embed_tokens.weight"
        tensors[name], tensors["model.embed_tokens.weight_scale"] = quantize_fp8(tensors[name].float())

    write_fp8(tmp_path, STATIC, quantize)
    reason = "model.embed_tokens.weight is stored as float8_e4m3fn"
    with pytest.raises(ModelError, match=re.escape(reason)) as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_quantization"
    refused = refusals(tmp_path)
    assert [reason in refusal.reason for refusal in refused] == [True], refused


def test_a_damaged_file_of_modelopt_is_refused(tmp_path: Path) -> None:
    form = FORMS["modelopt, a file of its own"]
    write_fp8(tmp_path, form._replace(files={"hf_quant_config.json": {"producer": {}}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json") as caught:
        read_facts(tmp_path)
    assert caught.value.code == "damaged"
