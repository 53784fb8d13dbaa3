"""Checkpoints of bitsandbytes, written here by the format's description, compared with the dequantized weights."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from bitsandbytes_weights import FORMS, Form, write
from every import every
from models_small import built, edit_config, expected_logits, our_logits, tokens_of
from planned_sizes import planned_bytes
from torch import Tensor

from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.platform.capabilities import missing_capability
from srv.quantization.formats.bitsandbytes_storage import TABLES
from srv.quantization.layers.blocks import GGUFLinear
from srv.quantization.layers.int8 import WeightOnlyInt8Linear
from srv.quantization.registry import detect, method_of, unsupported_form
from srv.testing.engine import user_input
from srv_kernels.oracles import dequantize_rows

DOWN = "model.layers.0.mlp.down_proj"


@every("kind", FORMS)
def test_logits_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded."""
    form, folder = FORMS[kind], tmp_path / kind.replace(" ", "-")
    sizes = {"hidden_size": 128, "head_dim": 32} if form.block > 64 else {}
    model = write(folder, form, **sizes)
    facts, tokens = read_facts(folder), tokens_of(model, 12)
    assert facts.quantization == "bitsandbytes"
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(folder)
    layers = [module for module in ours.modules() if isinstance(module, (GGUFLinear, WeightOnlyInt8Linear))]
    assert len(layers) == 2 * len(("qkv", "o", "gate_up", "down"))
    types = {matrix.quant_type for layer in layers if isinstance(layer, GGUFLinear) for matrix in layer.matrices}
    assert types == (set() if form.kind == "int8" else {form.kind.upper()})


# SHA-256 of the bytes that bitsandbytes 0.50.2 dequantizes the tensors of `_nested_tensors` to, on a CPU, by
# `functional.dequantize_4bit`: in float32, and in bfloat16.
DEQUANTIZED = {
    "nf4": (
        "86523c48899b8b14ec4258e5ba01ef5af90f3ecaaa4fb64f2a407b8afe60e7bf",
        "5ebdf483063682c31d85323f32ef3323efd7988114056c76451dd3855692a0eb",
    ),
    "fp4": (
        "ab0e8ace1b353ff1d3e2650e29470ec93bc66b893824142c5bac8ce7f8fd521e",
        "c97ee5f15c10644f4340c6fadda696b8440b92b4d9a11868ef85eea0853da32e",
    ),
}


def _nested_tensors(tensors: dict[str, Tensor]) -> None:
    """Put a matrix 256 x 512 with every code, every entry of the map, and 8 blocks of scales in place of a layer's."""
    count = torch.arange(65536)
    tensors[f"{DOWN}.weight"] = ((count * 37 + count // 256 * 11) % 256).to(torch.uint8)[:, None]
    tensors[f"{DOWN}.weight.absmax"] = (torch.arange(2048) * 101 % 256).to(torch.uint8)
    tensors[f"{DOWN}.weight.nested_absmax"] = (torch.arange(8).float() + 3) / 7
    tensors[f"{DOWN}.weight.nested_quant_map"] = (torch.arange(256).float() - 127) / 129
    (name,) = (tensor for tensor in tensors if tensor.startswith(f"{DOWN}.weight.quant_state"))
    state = {**json.loads(bytes(tensors[name].tolist())), "nested_offset": 1.100000023841858}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@every(
    ("kind", "dtype", "computed"),
    [
        ("nf4", torch.float32, "bfloat16"),
        ("nf4", torch.bfloat16, "float32"),
        ("fp4", torch.bfloat16, "float16"),
    ],
)
def test_weights_with_nested_scales_have_the_bits_of_bitsandbytes(
    kind: str, dtype: torch.dtype, computed: str, tmp_path: Path
) -> None:
    """In models of either dtype, whatever the dtype that bitsandbytes would compute in: nothing is rounded at load."""
    folder = tmp_path / f"{kind}-{computed}"
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 1}
    write(folder, Form(kind, nested=True), _nested_tensors, **sizes)
    edit_config(folder, quantization_config={**Form(kind).config, "bnb_4bit_compute_dtype": computed})
    layers = (module for module in built(folder, dtype=dtype).modules() if isinstance(module, GGUFLinear))
    (rows,) = (rows for layer in layers for name, rows in layer.weight_views().items() if DOWN in name)
    # float64 holds the product of a scale and a value of the table, so that this rounds once, as float32 does.
    weights = dequantize_rows(rows, kind.upper()).float()
    digests = [values.view(torch.uint8).numpy().tobytes() for values in (weights, weights.bfloat16())]
    assert tuple(hashlib.sha256(content).hexdigest() for content in digests) == DEQUANTIZED[kind]


def test_the_values_of_nf4_are_quantiles_of_the_normal_distribution() -> None:
    """As bitsandbytes computes them: eight positive and seven negative ones, and zero; the largest is 1."""

    def quantiles(count: int) -> list[float]:
        step = (0.9677083 - 0.5) / (count - 1)
        return [NormalDist().inv_cdf(0.9677083 - index * step) for index in range(count - 1)]

    values = sorted([*quantiles(9), 0.0, *(-quantile for quantile in quantiles(8))])
    assert [value / values[-1] for value in values] == pytest.approx(TABLES["nf4"], abs=1e-6)


def _change(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{DOWN}.{name}"))
        if changed is not None:
            tensors[f"{DOWN}.{name}"] = changed

    return spoil


def _state(**fields: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(stored: Tensor) -> Tensor:
        state = {**json.loads(bytes(stored.tolist())), **fields}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return _change("weight.quant_state.bitsandbytes__nf4", change)


def _poisoned(tensor: Tensor) -> Tensor:
    tensor[3] = math.inf
    return tensor


NESTED, INT8 = Form(nested=True), Form("int8")


@every(
    ("form", "spoil", "code", "part"),
    [
        (Form(), _change("weight.absmax", lambda _: None), "missing_tensors", r"lacks .*down_proj.weight.absmax"),
        (Form(), _change("weight.quant_map", lambda _: None), "missing_tensors", r"weight.quant_map"),
        (
            Form(),
            _change("weight.absmax", lambda tensor: tensor[:-1]),
            "shape_mismatch",
            r"absmax .* 64 x 128 in blocks of 64",
        ),
        (Form(), _change("weight.absmax", _poisoned), "damaged", "down_proj.weight.absmax has the value inf"),
        (
            Form(),
            _change("weight.absmax", lambda tensor: -tensor),
            "damaged",
            "weight.absmax .* not a finite number from 0",
        ),
        (Form(), _change("weight.absmax", lambda tensor: tensor.int()), "dtype_mismatch", "int32, not as floats"),
        (
            Form(),
            _change("weight.quant_map", lambda tensor: tensor.flip(0)),
            "damaged",
            "quant_map is not the table of nf4",
        ),
        (Form(), _change("weight", lambda tensor: tensor[:-4]), "shape_mismatch", "has 4092 bytes, but 64 x 128"),
        (Form(), _state(blocksize=32), "unsupported_quantization", "a scale per 32 weights"),
        (Form(), _state(quant_type="fp4"), "damaged", "is of type 'fp4'"),
        (Form(), _state(shape="x"), "damaged", "does not describe a matrix"),
        (Form(), _state(shape=[math.inf, 128]), "damaged", "does not describe a matrix .OverflowError"),
        (Form(), _state(shape=[64, 0]), "shape_mismatch", "64 x 0"),
        (NESTED, _change("weight.nested_quant_map", lambda _: None), "missing_tensors", "nested_quant_map"),
        (NESTED, _change("weight.absmax", lambda tensor: tensor.float()), "dtype_mismatch", "float32, not as uint8"),
        (INT8, _change("SCB", lambda _: None), "missing_tensors", "lacks .*down_proj.SCB"),
        (NESTED, _change("weight.nested_absmax", lambda tensor: -tensor), "damaged", "nested_absmax has the value -"),
        (
            NESTED,
            _change("weight.nested_quant_map", lambda tensor: tensor * math.inf),
            "damaged",
            "a scale of .* is not a finite number",
        ),
        (INT8, _change("SCB", lambda tensor: tensor[:-1]), "shape_mismatch", r"SCB has the shape \[63\]"),
        (INT8, _change("SCB", lambda tensor: tensor.int()), "dtype_mismatch", "SCB is stored as int32, not as floats"),
        (INT8, _change("weight", lambda tensor: tensor.float()), "dtype_mismatch", "float32, not as int8"),
        (
            Form(),
            _change("weight.quant_state.bitsandbytes__nf4", lambda _: None),
            "missing_tensors",
            "lacks .*down_proj.weight.quant_state.bitsandbytes__nf4",
        ),
        (INT8, _change("SCB", _poisoned), "damaged", "down_proj.SCB has the value inf"),
        (INT8, _change("SCB", lambda tensor: -tensor), "damaged", "SCB .* not a finite number from 0 on"),
        (INT8, _change("weight_format", lambda tensor: tensor + 1), "unsupported_quantization", "in the order .?1"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    form: Form, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, tmp_path: Path
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, form, spoil, num_hidden_layers=1)
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert caught.value.code == code
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
    if code in ("missing_tensors", "dtype_mismatch") or part.startswith("SCB has the shape"):  # headers show it
        assert [(refusal.code, caught.value.reason in refusal.reason) for refusal in refusals] == [(code, True)], (
            refusals
        )


def test_rows_that_are_no_whole_blocks_are_refused_by_a_plan_as_well(tmp_path: Path) -> None:
    write(tmp_path, Form(block=32), intermediate_size=96, num_hidden_layers=1)
    part = "the 96 inputs of .*down_proj are not whole blocks of 64"
    with pytest.raises(ModelError, match=f"{part}|a scale per 32 weights"):
        built(tmp_path)
    refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path)])).refusals
    assert [re.search(part, refusal.reason) is not None for refusal in refusals] == [True], refusals


def test_a_checkpoint_needs_the_op_of_its_type_alone(tmp_path: Path) -> None:
    """A platform that has kernels for int8 weights and none for blocks multiplies by int8 ones."""
    for kind, op, capability in (("int8", "linear_int8", "int8_weights"), ("nf4", "linear_gguf", "gguf_blocks")):
        write(tmp_path / kind, Form(kind), num_hidden_layers=1)
        method = method_of(read_facts(tmp_path / kind))
        assert method is not None
        assert method.ops == (op,)
        assert missing_capability(method.ops, {capability}) is None


@every(
    ("changes", "part"),
    [
        ({"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit"),
        ({"bnb_4bit_quant_type": "af4"}, "of type af4"),
        ({"bnb_4bit_quant_type": "nf5"}, "of type nf5"),
        ({"bnb_4bit_quant_storage": "float64"}, "stored as float64"),
        ({"llm_int8_skip_modules": 5}, "its llm_int8_skip_modules is 5, not a list of names"),
    ],
)
def test_forms_that_no_layer_supports_are_refused(changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    config = {"quantization_config": {**Form().config, **changes}}
    assert part in (unsupported_form(tmp_path, config) or "")
    assert detect(tmp_path, config) == "bitsandbytes"
