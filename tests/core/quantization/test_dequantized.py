"""Quantized checkpoints whose weights become floats while they are loaded, by the formula of each format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from fp8_weights import FORMS, write_fp8
from latent_steps import Steps
from models_small import built, expected_logits, our_logits, refused, small_model, tokens_of
from modelslim_weights import Stored, everything, quantize
from mxfp4_weights import write_gpt_oss
from packed_weights import exact_formula
from planned_sizes import planned_bytes
from quantized_cells import METHODS
from safetensors.torch import load_file, save_file
from stored_orders import made, stored_form, write_stored
from thread_ranks import on_ranks
from torch import Tensor, nn

from srv.models.base import NativeModel
from srv.models.read import read_facts
from srv.planning.plan import LaunchPlan, make_plan
from srv.specs import Latent
from srv.testing.engine import user_input

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 96}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Matrices that are fused, or whose rows or inputs are in another order than those of the layers.
ORDERS = [
    *(("phi3", form) for form in ("awq", "gptq of 8 bits", "compressed-tensors with zeros", "torchao")),
    *(("phi3", form) for form in ("fp8, blocks that end within layers", "bitsandbytes nf4", "bitsandbytes int8")),
    *(("glm4", form) for form in ("fp8, static", "gptq in another order", "int8")),
    *(("cohere", form) for form in ("compressed-tensors of 8 bits", "bitsandbytes fp4")),
    *(("v3", form) for form in ("awq", "fp8, blocks")),
    ("llama4", "compressed-tensors, channel"),
    ("gpt_oss", "awq"),
    ("neox", "gptq"),
    ("falcon", "compressed-tensors"),
    ("gpt2", "gptq with zeros in another order"),
]


@pytest.fixture(autouse=True)
def formula() -> Iterator[None]:
    with exact_formula():
        yield


def plan(arguments: list[str]) -> LaunchPlan:
    return make_plan(user_input(arguments))


def check(folder: Path, model: Any) -> None:
    """Layers hold floats, as many bytes as planned, and compute what `model` computes in float32."""
    ours, tokens, (group, *_) = built(folder, dequantize=True), tokens_of(model, 12), read_facts(folder).cache_groups
    assert isinstance(ours, NativeModel)
    assert {view.dtype for view in ours.weight_views().values()} == {torch.float32}
    assert ours.loaded_bytes() == planned_bytes(folder, dequantize_weights=True)
    latent = isinstance(group, Latent)
    logits = Steps(ours, group).run([([3, 1, 4], tokens, 0)]) if latent else our_logits(ours, tokens)
    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


@every(("kind", "form"), ORDERS)
def test_fused_and_reordered_matrices(kind: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{kind} {form}"
    fields = {"intermediate_size": 128} if form.startswith("bitsandbytes") else {}
    check(folder, write_stored(folder, made(kind, **fields), stored_form(form)))


FORMS_OF_METHODS = {name: method.form for name, method in METHODS.items() if name != "modelslim"}


@every(("method", "kind"), [(method, kind) for method in FORMS_OF_METHODS for kind in ("llama", "qwen3_moe")])
def test_every_method(method: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{method} {kind}"
    model = small_model(kind, **SIZES, **(BIASES if kind == "llama" else {}))
    check(folder, write_stored(folder, model, FORMS_OF_METHODS[method]))


@every("form", list(FORMS))
def test_every_form_of_fp8(form: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    check(folder, write_fp8(folder, FORMS[form], **BIASES))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    check(tmp_path, write_gpt_oss(tmp_path))


@every(("kind", "biases"), [("W8A8", {}), ("W8A8", BIASES), ("W8A8_DYNAMIC", BIASES)])
def test_integers_of_static_activations_contain_the_biases(kind: str, biases: dict[str, Any], tmp_path: Path) -> None:
    """With rounding to a whole number of steps, which the checkpoint has done."""
    folder, model = tmp_path / f"{kind} {len(biases)}", small_model("llama", **SIZES, **biases)
    quantize(folder, model, everything(kind))
    for name, module in list(model.named_modules()):
        if isinstance(module, Stored):
            model.set_submodule(name, floats_of(module.tensors, has_bias=bool(biases)))
    check(folder, model)


def floats_of(tensors: Mapping[str, Tensor], *, has_bias: bool) -> nn.Linear:
    """A layer of the stored tensors. Static activations compute an input of 0 to the bias."""
    weight = tensors["weight"]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)
    if "weight_scale" in tensors:
        linear.weight.data, bias = (weight * tensors["weight_scale"]).float(), tensors.get("bias")
    else:
        scale, zeros = tensors["deq_scale"], tensors["input_offset"].expand(weight.shape[1])
        linear.weight.data = (weight * (scale / tensors["input_scale"])[:, None]).float()
        bias = (weight @ zeros + tensors["quant_bias"]) * scale
    if has_bias:
        assert bias is not None
        linear.bias.data = bias.float()
    return linear


def test_values_are_rounded_once(tmp_path: Path) -> None:
    """To the dtype of the model: the product of a weight and its scale in float32 comes first."""
    model = write_stored(tmp_path, made("llama4"), stored_form("compressed-tensors, channel"))
    ours = built(tmp_path, dequantize=True, dtype=torch.bfloat16)
    exact = built(tmp_path, dequantize=True)
    assert isinstance(ours, NativeModel)
    assert isinstance(exact, NativeModel)
    wide = exact.weight_views()
    assert all(torch.equal(view, wide[name].to(view.dtype)) for name, view in ours.weight_views().items())
    assert model.config.model_type == "llama4_text"


def test_what_no_ranks_divide_is_divided_then(tmp_path: Path) -> None:
    """Phi-3's fused rows, which quantized layers keep whole."""
    model = write_stored(tmp_path, made("phi3", vocab_size=96), stored_form("awq"))
    tokens = tokens_of(model, 12)
    logits = on_ranks(
        2, lambda group, comm: our_logits(built(tmp_path, group=group, communicator=comm, dequantize=True), tokens)
    )
    for rank_logits in logits:
        torch.testing.assert_close(rank_logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)


def test_a_platform_without_the_products_serves_them_only_if_asked(tmp_path: Path) -> None:
    write_stored(tmp_path, made("phi3"), stored_form("awq"))
    plain = plan(["--device", "npu:a2", "--model-path", str(tmp_path)])
    (refusal,) = [candidate for candidate in plain.refusals if candidate.what == "quantization"]
    assert "--dequantize-weights" in refusal.remedy
    asked = plan(["--device", "npu:a2", "--model-path", str(tmp_path), "--dequantize-weights"])
    assert [refusal for refusal in asked.refusals if refusal.what == "quantization"] == []


def test_random_weights_follow_the_configuration(tmp_path: Path) -> None:
    """Quantized ones stay so unless the user asks for floats."""
    write_stored(tmp_path, made("phi3"), stored_form("awq"))
    quantized, floats = (built(tmp_path, load_format="dummy", dequantize=asked) for asked in (False, True))
    assert quantized.loaded_bytes() == planned_bytes(tmp_path, load_format="dummy")
    assert floats.loaded_bytes() == planned_bytes(tmp_path, load_format="dummy", dequantize_weights=True)
    assert quantized.loaded_bytes() < floats.loaded_bytes()


def test_zero_points_of_modelslim_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama", **SIZES), everything("W8A8_DYNAMIC"))
    name = "model.layers.0.self_attn.q_proj.weight_offset"
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, name: weights[name] + 1}, tmp_path / "model.safetensors")
    error = refused(tmp_path, dequantize=True)
    assert error.code == "unsupported_quantization"
    assert name in error.reason
