"""Checkpoints of torchao with weights of int8, 4 bits and FP8, written here by the formats' descriptions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from fp8_weights import ROW, Form, write_fp8
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from offloaded_weights import check_offloaded
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError, Rejection
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.formats.fp8_weights import NOTE
from srv.quantization.layers.blocks import GGUFExperts, GGUFLinear
from srv.quantization.layers.fp8 import Fp8Experts, Fp8Linear
from srv.quantization.layers.int8 import DynamicInt8Linear, WeightOnlyInt8Linear
from srv.quantization.registry import detect, method_of, unsupported_form
from srv.testing.engine import user_input

PROJECTION = re.compile(r"_proj\.weight$")
DOWN = "model.layers.0.mlp.down_proj"


def stated(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": fields}}}


def of(kind: str) -> dict[str, Any]:
    return {"_type": kind, "_data": {}}


WEIGHTS = stated("Int8WeightOnlyConfig", group_size=None, version=2)
DYNAMIC = stated("Int8DynamicActivationInt8WeightConfig", version=2)


def planned(folder: Path) -> int:
    return weight_bytes(make_config({"dtype": "float32"}), read_facts(folder))


def refusals(folder: Path) -> tuple[Rejection, ...]:
    """Why a plan says that a launch on processors would end."""
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals


def write(
    folder: Path,
    config: dict[str, Any],
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **fields: Any,
) -> Any:
    """A checkpoint. Returns a model of transformers with the same weights in float32."""
    model = small_model("llama", **{"num_hidden_layers": 1, **fields})
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if PROJECTION.search(name):
            weight, layer = stored.pop(name), name.removesuffix(".weight")
            scale = weight.abs().amax(1, keepdim=True) / 127
            values = (weight / scale).round().to(torch.int8)
            zeros = torch.zeros_like(scale, dtype=torch.int8)
            stored |= {f"{layer}._weight_qdata": values, f"{layer}._weight_scale": scale}
            stored[f"{layer}._weight_zero_point"] = zeros
            with torch.no_grad():
                parameter.copy_(values * scale)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=config)
    return model


def test_weights_are_int8_and_activations_as_the_configuration_says(tmp_path: Path) -> None:
    """The plan has the bytes that are loaded."""
    for kind, config in ((WeightOnlyInt8Linear, WEIGHTS), (DynamicInt8Linear, DYNAMIC)):
        folder = tmp_path / kind.__name__
        model = write(folder, config)
        facts, tokens = read_facts(folder), tokens_of(model, 12)
        ours = built(folder)
        assert [type(module) for module in ours.modules() if isinstance(module, kind)] == [kind] * 4
        tolerance = 3e-4 if kind is WeightOnlyInt8Linear else 0.1
        got, want = our_logits(ours, tokens), expected_logits(model, tokens)
        torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().max()), rtol=1e-4)
        assert (facts.quantization, ours.loaded_bytes()) == ("torchao", planned(folder))


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_hidden_layers": 2}


def four_bits(group: int, **fields: Any) -> dict[str, Any]:
    return stated("Int4WeightOnlyConfig", **{"group_size": group, "int4_packing_format": "plain", **fields})


def write_int4(
    folder: Path,
    group: int,
    spoil: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    config: dict[str, Any] | None = None,
    kind: str = "llama",
    **fields: Any,
) -> Any:
    """A checkpoint with weights of 4 bits: w = scale * q + zero. Returns a model with the same weights in float32."""
    model = small_model(kind, **{**SIZES, "num_hidden_layers": 1, **fields})
    model.save_pretrained(folder)
    same, stored = load_file(folder / "model.safetensors"), {}
    for name, weight in same.items():
        if not PROJECTION.search(name):
            stored[name] = weight
            continue
        layer, groups = name.removesuffix(".weight"), weight.unflatten(1, (-1, group))
        least, most = groups.amin(2), groups.amax(2)
        scale = ((most - least) / 15).bfloat16()
        zero = (least + 8 * scale.float()).bfloat16()
        codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
        same[name] = (codes * scale.float()[..., None] + zero.float()[..., None]).flatten(1)
        pairs = codes.flatten(1).to(torch.int16).unflatten(1, (-1, 2))
        stored[f"{layer}._weight_qdata"] = ((pairs[..., 0] & 15) + 16 * (pairs[..., 1] & 15)).to(torch.uint8)
        stored[f"{layer}._weight_scale"], stored[f"{layer}._weight_zero_point"] = scale.t(), zero.t()
    save_file(same, folder / "model.safetensors", {"format": "pt"})
    model = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=config or four_bits(group))
    return model.eval()


def test_a_weight_of_4_bits_is_what_its_numbers_say(tmp_path: Path) -> None:
    """Written number by number, and read back from the layer by the dequantization of the gguf package.

    The first of two neighbours is in the low half of a byte, integers are of two's complement, and scales have a row
    per group. The scales and zeros here are exact in float16.
    """
    outputs, inputs, group = 64, 64, 32
    codes = [
        [(3 * row + 5 * column + row * column // 7) % 16 - 8 for column in range(inputs)] for row in range(outputs)
    ]
    scales = [[2.0 ** -(1 + (row + 2 * part) % 5) for row in range(outputs)] for part in range(inputs // group)]
    zeros = [[(row - 20 - 9 * part) / 8 for row in range(outputs)] for part in range(inputs // group)]
    expected = [
        [codes[row][column] * scales[column // group][row] + zeros[column // group][row] for column in range(inputs)]
        for row in range(outputs)
    ]
    halves = [[(row[at] % 16) | (row[at + 1] % 16) << 4 for at in range(0, inputs, 2)] for row in codes]
    name = "model.layers.0.self_attn.o_proj"

    def set_numbers(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}._weight_qdata"] = torch.tensor(halves, dtype=torch.uint8).view(torch.int8)
        tensors[f"{name}._weight_scale"] = torch.tensor(scales, dtype=torch.bfloat16)
        tensors[f"{name}._weight_zero_point"] = torch.tensor(zeros, dtype=torch.bfloat16)

    write_int4(tmp_path, group, set_numbers)
    rows = built(tmp_path).weight_views()[f"{name}.weight"]  # type: ignore[attr-defined]
    assert dequantize(rows.numpy(), GGMLQuantizationType.Q4_1).tolist() == expected


@every("group", [32, 64])
def test_logits_of_4_bits_are_those_of_the_dequantized_weights(group: int, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits, as with every block of 4 bits. The plan has the bytes that are loaded."""
    folder = tmp_path / str(group)
    model = write_int4(folder, group)
    facts, tokens, ours = read_facts(folder), tokens_of(model, 12), built(folder)
    assert len([module for module in ours.modules() if isinstance(module, GGUFLinear)]) == 4
    got, want = our_logits(ours, tokens), expected_logits(model, tokens)
    assert float((got - want).square().mean().sqrt() / want.std()) < 0.05
    assert (facts.quantization, ours.loaded_bytes()) == ("torchao", planned(folder))
    assert refusals(folder) == ()


def test_experts_have_weights_of_4_bits(tmp_path: Path) -> None:
    model = write_int4(tmp_path, 32, kind="qwen3_moe", **EXPERTS)
    tokens, ours = tokens_of(model, 12), built(tmp_path)
    got, want = our_logits(ours, tokens), expected_logits(model, tokens)
    assert float((got - want).square().mean().sqrt() / want.std()) < 0.05
    assert sum(isinstance(module, GGUFExperts) for module in ours.modules()) == 2
    assert ours.loaded_bytes() == planned(tmp_path)


def test_layers_in_host_memory(tmp_path: Path) -> None:
    """Of 4 bits and of int8; FP8 weights are those of other checkpoints."""
    write_int4(tmp_path / "int4", 32, num_hidden_layers=3)
    assert check_offloaded(tmp_path / "int4") == {"linear_gguf"}
    write(tmp_path / "int8", WEIGHTS, num_hidden_layers=3)
    assert check_offloaded(tmp_path / "int8") == {"linear_int8"}


def floats(kind: str, granularity: Any = None, **fields: Any) -> dict[str, Any]:
    dtype = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    return stated(kind, **{"weight_dtype": dtype, "granularity": granularity, **fields})


def granularity(kind: str, **sizes: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 1, "_data": sizes}


def float_form(config: dict[str, Any], *block: int) -> Form:
    return Form("torchao", config, block or (0, 0), "_weight_scale", weight="_weight_qdata")


FLOATS = {
    "rows": float_form(floats("Float8WeightOnlyConfig", granularity("PerRow", dim=-1)), *ROW),
    "tensor": float_form(floats("Float8DynamicActivationFloat8WeightConfig")),
    "tensor, stated": float_form(floats("Float8WeightOnlyConfig", granularity("PerTensor"))),
    "groups": float_form(floats("Float8WeightOnlyConfig", granularity("PerGroup", group_size=32)), 1, 32),
    "blocks": float_form(
        floats(
            "Float8DynamicActivationFloat8WeightConfig",
            [granularity("PerBlock", block_size=[1, 128]), granularity("PerBlock", block_size=[128, 128])],
            packing_format={"_type": "Float8PackingFormat", "_data": "PLAIN"},
        ),
        *(128, 128),
    ),
}


@every("kind", FLOATS)
def test_fp8_weights_are_multiplied_by_unquantized_activations(kind: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded, and says what is done with activations."""
    folder = tmp_path / kind
    model = write_fp8(folder, FLOATS[kind], num_hidden_layers=1)
    facts, tokens, ours = read_facts(folder), tokens_of(model, 12), built(folder)
    assert len([module for module in ours.modules() if isinstance(module, Fp8Linear)]) == 4
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert (facts.quantization, ours.loaded_bytes()) == ("torchao", planned(folder))
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)]))
    assert plan.refusals == ()
    assert [note.partition(": ")[2] for note in plan.notes] == [NOTE]


def test_experts_have_fp8_weights(tmp_path: Path) -> None:
    model = write_fp8(tmp_path, FLOATS["rows"], kind="qwen3_moe", **{**EXPERTS, "moe_intermediate_size": 48})
    tokens, ours = tokens_of(model, 12), built(tmp_path)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert sum(isinstance(module, Fp8Experts) for module in ours.modules()) == 2
    assert ours.loaded_bytes() == planned(tmp_path)


def test_a_platform_needs_the_ops_of_the_stored_form_only(tmp_path: Path) -> None:
    """Weights of 4 bits need the products of blocks, and int8 weights do not."""
    write(tmp_path / "int8", WEIGHTS)
    write_int4(tmp_path / "int4", 32)
    write_fp8(tmp_path / "fp8", FLOATS["rows"], num_hidden_layers=1)
    methods = {path.name: method_of(read_facts(path)) for path in tmp_path.iterdir()}
    ops = {name: method.ops for name, method in methods.items() if method is not None}
    assert ops == {"int8": ("linear_int8",), "int4": ("linear_gguf",), "fp8": ("linear_fp8",)}


def _change(
    name: str, change: Callable[[Tensor], Tensor | None], layer: str = DOWN
) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{layer}.{name}"))
        if changed is not None:
            tensors[f"{layer}.{name}"] = changed

    return spoil


def _nan(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8)[0, 0] = 0x7F
    return tensor


def _further(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(shape)

    return spoil


Writer = Callable[[Path, Callable[[dict[str, Tensor]], None]], Any]


def _int8(folder: Path, spoil: Callable[[dict[str, Tensor]], None]) -> None:
    write(folder, WEIGHTS, spoil)


def _int4(folder: Path, spoil: Callable[[dict[str, Tensor]], None]) -> None:
    write_int4(folder, 32, spoil)


def _fp8(folder: Path, spoil: Callable[[dict[str, Tensor]], None]) -> None:
    write_fp8(folder, FLOATS["rows"], spoil, num_hidden_layers=1)


DAMAGED: list[tuple[Writer, Callable[[dict[str, Tensor]], None], str, str, bool]] = [
    (_int8, _change("_weight_scale", lambda _: None), "missing_tensors", "lacks .*_weight_scale", True),
    (_int8, _change("_weight_qdata", lambda _: None), "missing_tensors", "lacks .*_weight_qdata", True),
    (
        _int8,
        _change("_weight_scale", lambda tensor: tensor * torch.nan),
        "damaged",
        "is not a finite number from 0 on",
        False,
    ),
    (
        _int8,
        _change("_weight_scale", lambda tensor: tensor.repeat(1, 2)),
        "shape_mismatch",
        "down_proj._weight_scale",
        True,
    ),
    (_int8, _change("_weight_qdata", lambda tensor: tensor.float()), "dtype_mismatch", "float32, not as int8", True),
    (
        _int8,
        _change("_weight_zero_point", lambda tensor: tensor + 1),
        "unsupported_quantization",
        "only symmetric",
        False,
    ),
    (_int4, _change("_weight_zero_point", lambda _: None), "missing_tensors", "lacks .*_weight_zero_point", True),
    (
        _int4,
        _change("_weight_scale", lambda tensor: tensor.t()),
        "shape_mismatch",
        r"\[64, 4\], but .* need \[4, 64\]",
        True,
    ),
    (
        _int4,
        _change("_weight_qdata", lambda tensor: tensor[:, :-1]),
        "shape_mismatch",
        "no matrix of whole groups",
        True,
    ),
    (
        _int4,
        _change("_weight_qdata", lambda tensor: tensor.short()),
        "dtype_mismatch",
        "int16, not as uint8 or int8",
        True,
    ),
    (
        _int4,
        _change("_weight_zero_point", lambda tensor: tensor.to(torch.int8)),
        "dtype_mismatch",
        "as int8, not",
        True,
    ),
    (
        _int4,
        _change("_weight_scale", lambda tensor: tensor * torch.inf),
        "damaged",
        "is not a finite number from 0 on",
        False,
    ),
    *(
        (make, _change("_weight_scale", lambda tensor: -tensor), "damaged", "is not a finite number from 0 on", False)
        for make in (_int8, _int4)
    ),
    (_int4, _change("_weight_scale", lambda tensor: tensor * 1e8), "damaged", "that float16 can hold", False),
    (_int4, _change("_weight_scale", lambda tensor: tensor * 1e-30), "damaged", "that float16 can hold", False),
    (_int4, _further(f"{DOWN}._weight_act_pre_scale", 128), "unsupported_quantization", "inputs are multiplied", True),
    (_int4, _further("model.embed_tokens._weight_qdata", 9, 32), "unsupported_quantization", "no embedding", True),
    (_fp8, _change("_weight_scale", lambda _: None), "missing_tensors", "lacks .*_weight_scale", True),
    (_fp8, _change("_weight_scale", lambda tensor: tensor[:3]), "shape_mismatch", "down_proj._weight_scale", True),
    (_fp8, _change("_weight_scale", lambda tensor: tensor * torch.nan), "damaged", "has the value nan", False),
    (_fp8, _change("_weight_qdata", _nan), "damaged", "values that are NaN", False),
    (
        _fp8,
        _change("_weight_qdata", lambda tensor: tensor.float().to(torch.float8_e5m2)),
        *("unsupported_quantization", "float8_e5m2, not as float8_e4m3fn", True),
    ),
]


@every(("make", "spoil", "code", "part", "in_headers"), DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_name(
    make: Writer, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, in_headers: bool, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    make(folder, spoil)
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert caught.value.code == code
    if in_headers:
        refused = refusals(folder)
        assert [re.search(part, refusal.reason) is not None for refusal in refused] == [True], refused


@every(
    ("config", "part"),
    [
        (four_bits(128, int4_packing_format="tile_packed_to_4d"), "packed for kernels (tile_packed_to_4d), not plain"),
        (four_bits(48), "its groups have 48 inputs, not a multiple of 32"),
        (four_bits(32, group_size="many"), "has the size 'many'"),
        (stated("Int4DynamicActivationInt4WeightConfig"), "its weights are of Int4DynamicActivationInt4WeightConfig"),
        (stated("FqnToConfig"), "its FqnToConfig has no fqn_to_config"),
        (stated("FqnToConfig", fqn_to_config={"_default": None}), "it quantizes no layer"),
        (stated("FqnToConfig", fqn_to_config={"re:((": None}), "'re:((', which is not a regular expression"),
        (
            stated("FqnToConfig", fqn_to_config={"a": of("Int8WeightOnlyConfig"), "b": of("Int4WeightOnlyConfig")}),
            "its layers are quantized differently ('a' and 'b')",
        ),
        (stated("Int8WeightOnlyConfig", group_size=32), "a scale per 32 inputs"),
        (stated("Int8WeightOnlyConfig", granularity=granularity("PerTensor")), "scales of PerTensor, not PerRow"),
        (
            floats("Float8WeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "float8_e5m2"}),
            "of float8_e5m2, not float8_e4m3fn",
        ),
        (floats("Float8WeightOnlyConfig", granularity("PerToken")), "have scales of PerToken"),
        (floats("Float8WeightOnlyConfig", granularity("PerGroup", group_size=24)), "blocks are 1 x 24"),
        (floats("Float8WeightOnlyConfig", granularity("PerGroup")), "has the size None"),
        (
            floats("Float8WeightOnlyConfig", granularity("PerBlock", block_size=[1, 32, 32])),
            "has the block [1, 32, 32]",
        ),
        (floats("Float8WeightOnlyConfig", []), "has an invalid value (IndexError"),
        (
            floats("Float8DynamicActivationFloat8WeightConfig", packing_format="sparse_1d_data_1d_metadata"),
            "packed for kernels (sparse_1d_data_1d_metadata)",
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {}, "lm_head": {}}}, "quantized differently"),
    ],
)
def test_forms_that_no_layer_supports_are_refused_by_plan_and_launch(
    config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, config)
    assert part in (unsupported_form(folder, {"quantization_config": config}) or "")
    assert detect(folder, {"quantization_config": config}) == "torchao"
    with pytest.raises(ModelError, match=re.escape(part)):
        built(folder)
    refused = refusals(folder)
    assert any(part in refusal.reason for refusal in refused), refused
