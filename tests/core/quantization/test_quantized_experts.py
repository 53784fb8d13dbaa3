"""Experts that torchao and bitsandbytes quantized, and int8 experts without quantized activations.

transformers keeps the experts of a layer in two parameters: bitsandbytes leaves these as they are, and torchao does
unless a configuration names them. Older checkpoints have a linear layer for each projection of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes_weights
import pytest
import torch
from every import every
from mixed_weights import config_of, of_int8
from models_small import built, edit_config, expected_logits, our_logits, small_model, tokens_of
from offloaded_weights import check_offloaded
from safetensors.torch import load_file, save_file
from stored_orders import made
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError
from srv.models.layers.experts import ExpertWeights
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.testing.engine import user_input

SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "head_dim": 16, "intermediate_size": 128}
PROJECTION = re.compile(r"(.*_proj)\.weight")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")
EXPERTS = "model.layers.0.mlp.experts"
GROUP = 32
NOTE = "the inputs of its int8 experts are quantized to int8 as well"

# The tensors of a layer by their suffixes, and the weights that they stand for.
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
Spoil = Callable[[dict[str, Tensor]], None]


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round()
    return {"_weight_qdata": values.to(torch.int8), "_weight_scale": scale}, values * scale


def int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    least, most = groups.amin(2), groups.amax(2)
    scale = ((most - least) / 15).half().float()
    zero = (least + 8 * scale).half().float()
    codes = ((groups - zero[..., None]) / scale[..., None]).round().clamp(-8, 7)
    pairs = codes.flatten(1).to(torch.int16).unflatten(1, (-1, 2)) & 15
    parts = {"_weight_qdata": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)}
    base = (zero - 8 * scale).half().float()  # blocks hold it in float16
    return parts | {"_weight_scale": scale.t(), "_weight_zero_point": zero.t()}, (
        (codes + 8) * scale[..., None] + base[..., None]
    ).flatten(1)


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"_weight_qdata": values, "_weight_scale": scale}, values.float() * scale


def bitsandbytes_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, plain = bitsandbytes_weights.packed("", weight, bitsandbytes_weights.Form("int8"))
    return {name.removeprefix("."): tensor for name, tensor in tensors.items()}, plain


def torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 1, "_data": fields}}}


def by_name(kind: str, **fields: Any) -> dict[str, Any]:
    """Of the experts' parameters, and of linear layers."""
    one = {"_type": kind, "_version": 1, "_data": fields}
    patterns = {r"re:.*\.experts\.(gate_up|down)_proj": one, "re:.*lm_head": None, "_default": one}
    return torchao("FqnToConfig", fqn_to_config=patterns, module_fqn_to_config=patterns)


EIGHT, DYNAMIC = "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"
FOUR = ("Int4WeightOnlyConfig", {"group_size": GROUP, "int4_packing_format": "plain"})
BITSANDBYTES = bitsandbytes_weights.Form("int8").config
_INT8_GROUP = of_int8()
WEIGHTS_ONLY = config_of(
    {("Linear",): _INT8_GROUP._replace(fields={**_INT8_GROUP.fields, "input_activations": None})}, "int-quantized"
)


def compressed_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, plain = _INT8_GROUP.stored("", weight)
    return {name.removeprefix("."): tensor for name, tensor in tensors.items()}, plain


FORMS: dict[str, tuple[Quantize, dict[str, Any], str, bool]] = {
    "torchao, int8": (int8, torchao(EIGHT), "experts_int8", False),
    "torchao, int8 in one tensor": (int8, by_name(EIGHT), "experts_int8", True),
    "torchao, dynamic int8": (int8, torchao(DYNAMIC), "experts_int8", False),
    "torchao, 4 bits in one tensor": (int4, by_name(FOUR[0], **FOUR[1]), "experts_gguf", True),
    "torchao, FP8 in one tensor": (fp8, by_name("Float8WeightOnlyConfig"), "experts_fp8", True),
    "bitsandbytes, int8": (bitsandbytes_int8, BITSANDBYTES, "experts_int8", False),
    "compressed-tensors, int8 without activations": (compressed_int8, WEIGHTS_ONLY, "experts_int8", False),
}


def write(
    folder: Path,
    quantize: Quantize,
    config: dict[str, Any],
    fused: bool,
    spoil: Spoil = lambda tensors: None,
    plain_experts: bool = False,
) -> Any:
    """A checkpoint, and a model of transformers with the same weights in float32.

    `plain_experts`: the parameters of experts stay as they are.
    """
    model = small_model("qwen3_moe", **SIZES)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, weight in load_file(file).items():
        layer, expert = PROJECTION.fullmatch(name), EXPERT.match(name)
        if layer is None or (plain_experts and expert is not None):
            same[name] = weight
            if not plain_experts or expert is None:
                stored[name] = weight
            continue
        tensors, same[name] = quantize(weight)
        for suffix, tensor in tensors.items():
            if fused and expert is not None:
                parts.setdefault(expert[1], {}).setdefault(f"{expert[3]}{suffix}", {})[int(expert[2])] = tensor
            else:
                stored[f"{layer[1]}.{suffix}"] = tensor
    for prefix, experts in parts.items():
        for suffix in {name.partition("_")[2] for name in experts}:
            gate, up, down = (
                torch.stack([experts[f"{kind}_{suffix}"][number] for number in sorted(experts[f"{kind}_{suffix}"])])
                for kind in ("gate", "up", "down")
            )
            part = suffix.removeprefix("weight_")
            outputs = 2 if part != "qdata" and quantize is int4 else 1  # the axis
            stored[f"{prefix}._gate_up_proj_{part}"] = torch.cat((gate, up), outputs)
            stored[f"{prefix}._down_proj_{part}"] = down
    save_file(same, file, {"format": "pt"})
    model = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if plain_experts:
        stored |= {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    spoil(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, file)
    edit_config(folder, quantization_config=config)
    return model.eval()


def planned(folder: Path) -> int:
    return weight_bytes(make_config({"dtype": "float32"}), read_facts(folder))


def refusals(folder: Path, *arguments: str) -> list[str]:
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments]))
    return [refusal.reason for refusal in plan.refusals]


@every("kind", FORMS)
def test_logits_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """On the device, and in host memory. A plan has the bytes that are loaded.

    The reference of int8 experts quantizes inputs, as the op allows, so that a token may get another expert.
    """
    quantize, config, op, fused = FORMS[kind]
    folder = tmp_path / kind
    model = write(folder, quantize, config, fused)
    tokens = tokens_of(model, 12)
    ours = built(folder)
    got, want = our_logits(ours, tokens), expected_logits(model, tokens)
    distance = (got - want).abs().amax(-1) / want.abs().max()
    assert float(distance.median()) < (0.05 if op == "experts_int8" else 3e-4)
    assert [module.op for module in ours.modules() if isinstance(module, ExpertWeights)] == [op] * 3
    assert op in check_offloaded(folder)
    method = read_facts(folder).quantization
    assert (method == "bitsandbytes") == (config is BITSANDBYTES)
    if method != "bitsandbytes":  # which counts what any platform makes of blocks
        assert ours.loaded_bytes() == planned(folder)
    assert refusals(folder) == []


def test_the_weights_of_int8_experts_are_read_exactly(tmp_path: Path) -> None:
    """Whatever the kernel makes of the inputs: each matrix, times its scales."""
    for kind in ("torchao, int8 in one tensor", "bitsandbytes, int8", "compressed-tensors, int8 without activations"):
        quantize, config, _, fused = FORMS[kind]
        folder = tmp_path / kind
        model = write(folder, quantize, config, fused)
        experts = next(module for module in built(folder).modules() if isinstance(module, ExpertWeights))
        operands = experts.operands()[0]
        weights = model.model.layers[0].mlp.experts
        for name, want in (("gate_up", weights.gate_up_proj), ("down", weights.down_proj)):
            wide = operands[name].float() * operands[f"{name}_scale"].unsqueeze(-1)
            torch.testing.assert_close(wide, want.detach(), rtol=1e-6, atol=0)


@every("kind", ["torchao, int8", "bitsandbytes, int8"])
def test_experts_that_a_library_left_unquantized_are_served_beside_int8_layers(kind: str, tmp_path: Path) -> None:
    quantize, config, _, _ = FORMS[kind]
    folder = tmp_path / kind
    model = write(folder, quantize, config, fused=False, plain_experts=True)
    tokens = tokens_of(model, 12)
    ours = built(folder)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert [module.op for module in ours.modules() if isinstance(module, ExpertWeights)] == ["experts"] * 3
    plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)]))
    assert plan.refusals == ()
    assert not any(NOTE in note for note in plan.notes)


def test_a_plan_says_where_the_inputs_of_int8_experts_are_quantized(tmp_path: Path) -> None:
    for kind in ("torchao, int8", "bitsandbytes, int8", "compressed-tensors, int8 without activations"):
        quantize, config, _, _ = FORMS[kind]
        write(tmp_path / kind, quantize, config, fused=False)
        plan = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(tmp_path / kind)]))
        assert any(NOTE in note for note in plan.notes), kind


def _change(suffix: str, change: Callable[[Tensor], Tensor | None]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        changed = change(tensors.pop(f"{EXPERTS}.{suffix}"))
        if changed is not None:
            tensors[f"{EXPERTS}.{suffix}"] = changed

    return spoil


def _bias(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.gate_up_proj_bias"] = torch.zeros(7, 128)


ONE = "torchao, int8 in one tensor"
DAMAGED: list[tuple[str, Spoil, str, str, bool]] = [
    (ONE, _change("_gate_up_proj_scale", lambda _: None), "missing_tensors", "lacks .*_scale", True),
    (ONE, _change("_down_proj_qdata", lambda _: None), "missing_tensors", "lacks .*down_proj._weight_qdata", True),
    (ONE, _change("_gate_up_proj_scale", lambda tensor: tensor[:, :-2]), "shape_mismatch", "_weight_scale has", True),
    (ONE, _change("_gate_up_proj_scale", lambda tensor: tensor[:1, :1]), "shape_mismatch", "_weight_scale has", True),
    (ONE, _change("_gate_up_proj_qdata", lambda tensor: tensor.short()), "dtype_mismatch", "int16, not as int8", True),
    (ONE, _change("_gate_up_proj_scale", lambda tensor: tensor * torch.nan), "damaged", "not a finite number", False),
    (
        ONE,
        _change("_gate_up_proj_scale", lambda tensor: tensor * 0),
        "unsupported_quantization",
        "is 0 for all of",
        False,
    ),
    (ONE, _bias, "unsupported_quantization", "are int8 and have biases", True),
    (
        "torchao, 4 bits in one tensor",
        _change("_gate_up_proj_zero_point", lambda _: None),
        *("missing_tensors", "lacks .*_weight_zero_point", True),
    ),
    (
        "torchao, 4 bits in one tensor",
        _change("_down_proj_scale", lambda tensor: tensor.transpose(1, 2)[:, :-1]),
        *("shape_mismatch", "down_proj._weight_scale has the shape", True),
    ),
    (
        "torchao, FP8 in one tensor",
        _change("_gate_up_proj_scale", lambda _: None),
        *("missing_tensors", "lacks .*experts._gate_up_proj_scale, by which", True),
    ),
    (
        "bitsandbytes, int8",
        _change("1.up_proj.SCB", lambda tensor: tensor[1:]),
        *("shape_mismatch", "experts.1.up_proj.SCB has the shape", True),
    ),
    (
        "bitsandbytes, int8",
        _change("1.up_proj.SCB", lambda tensor: tensor * torch.nan),
        *("damaged", "which is not a finite number", False),
    ),
]


@every(("kind", "spoil", "code", "part", "in_headers"), DAMAGED)
def test_damaged_experts_are_refused_by_name(
    kind: str, spoil: Spoil, code: str, part: str, in_headers: bool, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    quantize, config, _, fused = FORMS[kind]
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    write(folder, quantize, config, fused, spoil)
    with pytest.raises(ModelError, match=part) as caught:
        built(folder)
    assert (caught.value.code, "model.layers.0." in str(caught.value)) == (code, True), caught.value
    if in_headers:
        assert [re.search(part, reason) is not None for reason in refusals(folder)] == [True], refusals(folder)


def test_scales_of_the_inputs_of_a_transposed_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """Llama 4 has the inputs of experts as rows, to which torchao gives a scale each."""
    made("llama4").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.feed_forward.experts"
    weight = tensors.pop(f"{name}.gate_up_proj")
    scale = weight.abs().amax(2, keepdim=True) / 127
    tensors[f"{name}._gate_up_proj_qdata"] = (weight / scale).round().to(torch.int8)
    tensors[f"{name}._gate_up_proj_scale"] = scale
    save_file(tensors, file)
    edit_config(tmp_path, quantization_config=by_name(EIGHT))
    part = "are in one tensor with a scale for each input"
    with pytest.raises(ModelError, match=part):
        built(tmp_path)
    assert [part in reason for reason in refusals(tmp_path)] == [True]
