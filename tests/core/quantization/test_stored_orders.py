"""Quantized checkpoints whose matrices are fused, or whose rows are in another order than those of the layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from latent_steps import Steps
from models_small import built, edit_config, expected_logits, our_logits, tokens_of
from planned_sizes import planned_bytes
from stored_orders import made, stored_form, write_stored
from torch import Tensor

from srv.args.config import make_config
from srv.errors import ModelError
from srv.models.base import CausalLM, NativeModel
from srv.models.checkpoints.row_orders import RowOrder, swapped_halves
from srv.models.layers.linear import Linear, Projection
from srv.models.read import read_facts
from srv.planning.budget import weight_bytes
from srv.planning.plan import make_plan
from srv.quantization.layers.blocks import GGUFExperts
from srv.quantization.layers.fp8 import Fp8Linear
from srv.specs import Latent
from srv.testing.engine import user_input

PHI3 = ["awq", "gptq with zeros in another order", "gptq of 8 bits", "compressed-tensors with zeros", "int8"]
PHI3 += ["fp8, static", "fp8, blocks that end within layers", "compressed-tensors, channel", "torchao"]
KIMI = r"self_attn|shared_experts|layers\.0\.mlp\.(gate|up|down)_proj"  # what Kimi K2 leaves as it is
CASES = [
    *(("phi3", form, "") for form in PHI3),
    *(("phi3", form, "") for form in ("bitsandbytes nf4", "bitsandbytes int8")),
    *(("glm4", form, "") for form in ("fp8, static", "fp8, blocks", "gptq in another order", "int8")),
    *(("cohere", form, "") for form in ("awq", "compressed-tensors of 8 bits", "int8", "bitsandbytes fp4")),
    ("v3", "awq", ""),
    ("v3", "gptq", "q_a_proj|kv_a_proj"),
    ("v3", "compressed-tensors", KIMI),
    ("v2-lite", "int8", "experts"),
    ("v2-lite", "compressed-tensors with zeros", ""),
    ("llama4", "compressed-tensors", ""),
    ("llama4", "compressed-tensors, channel", "self_attn|shared_expert"),
    ("llama4", "compressed-tensors, channel", ""),
    ("gpt_oss", "fp8, static", "experts"),
    ("gpt_oss", "awq", "experts"),
    ("neox", "gptq", ""),
    ("neox", "int8", ""),
    ("falcon", "compressed-tensors", ""),
    ("gpt2", "gptq with zeros in another order", ""),
]


def logits_of(model: CausalLM, folder: Path, tokens: Tensor) -> Tensor:
    (group, *_) = read_facts(folder).cache_groups
    if isinstance(group, Latent):
        return Steps(model, group).run([([3, 1, 4], tokens, 0)])
    return our_logits(model, tokens)


def refusals(folder: Path) -> tuple[Any, ...]:
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals


@every(("kind", "form", "ignore"), CASES)
def test_logits_are_those_of_the_dequantized_weights(kind: str, form: str, ignore: str, tmp_path: Path) -> None:
    """The plan has the bytes that are loaded. Layers left out (`ignore`) have the order of the others."""
    folder = tmp_path / f"{kind} {form} {len(ignore)}"
    fields = {"intermediate_size": 128} if form.startswith("bitsandbytes") else {}  # whole blocks of 64
    model = write_stored(folder, made(kind, **fields), stored_form(form), ignore=ignore)
    tokens = tokens_of(model, 12)
    ours = built(folder)
    assert isinstance(ours, NativeModel)
    torch.testing.assert_close(logits_of(ours, folder, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
    assert ours.loaded_bytes() == planned_bytes(folder)
    assert built(folder, dtype=torch.bfloat16).loaded_bytes() == planned_bytes(folder, "bfloat16")
    assert refusals(folder) == ()
    plain = [name for module in ours.modules() if isinstance(module, Linear) for name in module.output_sizes]
    left = [name for name in plain if name.endswith("_proj") and not (ignore and re.search(ignore, name))]
    assert left == []


def test_fused_matrices_stay_whole(tmp_path: Path) -> None:
    """Whatever the width of blocks: those of 48 rows would end within the queries and the keys."""
    write_stored(tmp_path, made("phi3"), stored_form("fp8, blocks that end within layers"))
    layers = [module for module in built(tmp_path).modules() if isinstance(module, Projection)]
    names = [list(layer.output_sizes) for layer in layers if isinstance(layer, Fp8Linear)]
    of_first = [name for name in names if ".0." in name[0]]
    ends = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert of_first == [[f"model.layers.0.{end}"] for end in ends]


def test_only_the_experts_of_kimi_are_packed(tmp_path: Path) -> None:
    write_stored(tmp_path, made("v3"), stored_form("compressed-tensors"), ignore=KIMI)
    edit_config(tmp_path, quantization_config=_ignoring(stored_form("compressed-tensors").config, f"re:.*({KIMI}).*"))
    ours = built(tmp_path)
    assert sum(isinstance(module, GGUFExperts) for module in ours.modules()) == 1
    assert refusals(tmp_path) == ()


def _ignoring(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**config, "ignore": [*config["ignore"], *names]}


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _shorter(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:-1])


QKV, UP = "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.kv_b_proj"


@every(
    ("kind", "form", "spoil", "code", "part"),
    [
        ("phi3", "awq", _without(f"{QKV}.scales"), "missing_tensors", "qkv_proj.scales"),
        ("phi3", "awq", _shorter(f"{QKV}.qzeros"), "shape_mismatch", "qkv_proj.qzeros has the shape"),
        ("phi3", "fp8, blocks", _shorter(f"{QKV}.weight_scale_inv"), "shape_mismatch", "qkv_proj.weight_scale_inv has"),
        ("phi3", "int8", _without(f"{QKV}.weight_scale"), "missing_tensors", "qkv_proj.weight_scale"),
        ("v3", "awq", _without(f"{UP}.qzeros"), "missing_tensors", "kv_b_proj.qzeros"),
        ("v3", "awq", _shorter(f"{UP}.scales"), "shape_mismatch", "kv_b_proj.scales has the shape"),
        ("v3", "int8", _without(f"{UP}.weight_scale"), "missing_tensors", "kv_b_proj.weight_scale"),
    ],
)
def test_damaged_tensors_are_refused_by_their_stored_names(
    kind: str, form: str, spoil: Callable[[dict[str, Tensor]], None], code: str, part: str, tmp_path: Path
) -> None:
    """By a plan as well."""
    folder = tmp_path / f"{kind} {form} {code} {part[:9]}"
    write_stored(folder, made(kind), stored_form(form), spoil)
    with pytest.raises(ModelError) as caught:
        built(folder)
    assert (caught.value.code, part in str(caught.value)) == (code, True), caught.value
    assert [part in refusal.reason for refusal in refusals(folder)] == [True]


def test_rows_of_groups_that_would_leave_their_blocks_are_refused(tmp_path: Path) -> None:
    """GPT-NeoX stores the query, the key and the value of each head side by side: here 16 rows of each."""
    write_stored(tmp_path, made("neox"), stored_form("fp8, blocks"))
    part = "the rows of a head of self_attn.query_key_value are not whole blocks of 32 rows"
    with pytest.raises(ModelError, match=part):
        built(tmp_path)
    assert [part in refusal.reason for refusal in refusals(tmp_path)] == [True]


def test_whole_blocks_of_rows_change_places(tmp_path: Path) -> None:
    model = write_stored(tmp_path, made("neox", hidden_size=128, intermediate_size=96), stored_form("fp8, blocks"))
    tokens = tokens_of(model, 12)
    ours = our_logits(built(tmp_path), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


@every("form", ["bitsandbytes nf4", "torchao"])
def test_an_up_projection_that_a_method_does_not_dequantize_is_refused_by_name(form: str, tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 64, "intermediate_size": 128}  # whole blocks of 64
    write_stored(folder := tmp_path / form, made("v3", **sizes), stored_form(form))
    part = "self_attn.kv_b_proj is quantized with"
    with pytest.raises(ModelError, match=part):
        built(folder)
    assert [part in refusal.reason for refusal in refusals(folder)] == [True]
    write_stored(folder := tmp_path / f"{form} in part", made("v3", **sizes), stored_form(form), ignore="kv_b_proj")
    assert built(folder).loaded_bytes() == planned_bytes(folder)
    assert refusals(folder) == ()


def test_dummy_weights_have_the_bytes_of_a_configuration_alone(tmp_path: Path) -> None:
    """Of fused matrices, which the configuration names as they are stored."""
    write_stored(tmp_path, made("phi3"), stored_form("int8"))
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config=_ignoring(stored_form("int8").config, QKV))
    config = make_config({"dtype": "float32", "load_format": "dummy"})
    held = built(tmp_path, load_format="dummy").loaded_bytes()
    assert weight_bytes(config, read_facts(tmp_path)) == pytest.approx(held, rel=0.002)


def test_blocks_move_as_wholes() -> None:
    assert RowOrder((2, 3, 0, 1, 4)).of_blocks(2) == [1, 0, 2]
    assert RowOrder((1, 0, 2, 3)).of_blocks(2) == [0, 1]
    assert RowOrder((0, 2, 1, 3)).of_blocks(2) is None
    assert swapped_halves(6).rows == [3, 4, 5, 0, 1, 2]
