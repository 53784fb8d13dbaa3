"""Checkpoints of modelslim: int8 layers compute what the format specifies, and invalid checkpoints are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from latent_steps import Steps
from models_small import built, edit_config, edit_weights, expected_logits, our_logits, refused, small_model, tokens_of
from modelslim_weights import DESCRIPTION, STEP, everything, mixed, quantize
from offloaded_weights import check_offloaded
from safetensors.torch import load_file
from stored_orders import made
from torch import Tensor

from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.plan import make_plan
from srv.quantization.layers.int8 import DynamicInt8Linear, StaticInt8Linear
from srv.specs import Latent
from srv.testing.engine import user_input


def described(folder: Path, **changes: str) -> None:
    path = folder / DESCRIPTION
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def check(folder: Path, model: Any) -> None:
    """Our logits equal those of the model with the stored layers, except for activations that round differently."""
    tokens = tokens_of(model, 12)
    ours, wanted = our_logits_of(folder, tokens), expected_logits(model, tokens)
    assert float((ours - wanted).abs().max()) < 0.05 * float(wanted.std())


def our_logits_of(folder: Path, tokens: Tensor) -> Tensor:
    return our_logits(built(folder), tokens)


def _attention_without_up_projection(kind: str) -> Callable[[str], str]:
    return lambda name: kind if "self_attn" in name and "kv_b_proj" not in name else "FLOAT"


@every("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_rows_of_deepseek_and_glm_get_the_order_of_the_layers(kind: str, tmp_path: Path) -> None:
    """Of tensors that only this format has as well."""
    folder, model = tmp_path / f"v3 {kind}", made("v3", attention_bias=False)
    quantize(folder, model, _attention_without_up_projection(kind))
    tokens = tokens_of(model, 12)
    ours, wanted = built(folder), expected_logits(model, tokens)
    (group,) = read_facts(folder).cache_groups
    assert isinstance(group, Latent)
    logits = Steps(ours, group).run([([3, 1, 4], tokens, 0)])
    assert float((logits - wanted).abs().max()) < 0.05 * float(wanted.std())
    assert make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals == ()
    folder, model = tmp_path / f"glm {kind}", made("glm4")
    quantize(folder, model, everything(kind))
    check(folder, model)


@every("arch", ["llama", "qwen2", "qwen3"])
@every("kinds", [everything("W8A8_DYNAMIC"), everything("W8A8"), mixed])
def test_logits_are_those_of_the_stored_integers(arch: str, kinds: Callable[[str], str], tmp_path: Path) -> None:
    """Qwen2 has biases: separate in dynamic layers, folded into `quant_bias` in static ones."""
    model = small_model(arch)
    plain = expected_logits(model, tokens_of(model, 12))
    quantize(tmp_path, model, kinds)
    check(tmp_path, model)
    moved = expected_logits(model, tokens_of(model, 12)) - plain
    assert float(moved.abs().max()) > 0.05 * float(plain.std())  # so that the test would detect unquantized logits


@every("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_layers_in_host_memory(kind: str, tmp_path: Path) -> None:
    """Of Qwen2, which has biases."""
    quantize(tmp_path / kind, small_model("qwen2", num_hidden_layers=3), everything(kind))
    assert check_offloaded(tmp_path / kind) == {"linear_w8a8_static" if kind == "W8A8" else "linear_w8a8"}


def test_the_facts_have_the_quantization(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), mixed)
    facts = read_facts(tmp_path)
    assert (facts.quantization, facts.dtype) == ("modelslim", "float32")


def test_each_layer_has_its_described_kind(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), mixed)
    kinds = {name: type(module).__name__ for name, module in built(tmp_path).named_modules()}
    assert kinds["layers.0.attention.qkv_proj"] == kinds["lm_head"] == "DynamicInt8Linear"
    assert kinds["layers.1.mlp.gate_up_proj"] == "StaticInt8Linear"
    assert kinds["layers.2.mlp.down_proj"] == "Linear"


def test_a_description_within_the_configuration(tmp_path: Path) -> None:
    model = small_model("llama")
    quantize(tmp_path, model, mixed)
    edit_config(tmp_path, quantization_config=json.loads((tmp_path / DESCRIPTION).read_text()))
    (tmp_path / DESCRIPTION).unlink()
    assert read_facts(tmp_path).quantization == "modelslim"
    check(tmp_path, model)


def test_a_description_without_quantized_layers_is_an_unquantized_checkpoint(tmp_path: Path) -> None:
    model = small_model("llama")
    quantize(tmp_path, model, everything("FLOAT"))
    assert read_facts(tmp_path).quantization is None
    check(tmp_path, model)


def test_tied_embeddings_stay_unquantized_and_layers_do_not(tmp_path: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    quantize(tmp_path, model, everything("W8A8_DYNAMIC"))
    check(tmp_path, model)
    assert type(built(tmp_path).layers[0].attention.qkv_proj) is DynamicInt8Linear  # type: ignore[index, union-attr]


def test_offsets_stored_as_whole_numbers(tmp_path: Path) -> None:
    model = small_model("llama")
    quantize(tmp_path, model, everything("W8A8"))
    stored = load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, **{name: t.to(torch.int8) for name, t in stored.items() if name.endswith("input_offset")})
    check(tmp_path, model)


def test_the_configuration_of_another_method_is_not_a_description(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "other", "model.layers.0.mlp.up_proj.weight": "W8A8"})
    assert read_facts(tmp_path).quantization == "other"


@every("name", ["model.layers.0.input_layernorm.bias", "model.layers.1.self_attn.k_proj.kv_cache_scale"])
def test_outliers_in_norms_and_quantized_caches_are_refused_by_name(name: str, tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), everything("W8A8"))
    described(tmp_path, **{name: "W8A8"})
    with pytest.raises(ModelError, match="outliers") as caught:
        read_facts(tmp_path)
    assert caught.value.code == "unsupported_quantization"
    assert name in caught.value.reason


def test_scales_stored_as_the_bits_of_float32(tmp_path: Path) -> None:
    """Checkpoints for float16 store deq_scale as int64: a float32 in the lower half, kernel flags in the upper half."""
    model = small_model("llama")
    quantize(tmp_path, model, everything("W8A8"))
    scales = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if k.endswith("deq_scale")}
    flag = 1 << 46
    edit_weights(tmp_path, **{name: scale.view(torch.int32).long() | flag for name, scale in scales.items()})
    check(tmp_path, model)


def test_redundant_tensors_of_static_layers_are_skipped(tmp_path: Path) -> None:
    model = small_model("qwen2")
    quantize(tmp_path, model, everything("W8A8"))
    rows = model.config.hidden_size
    name = "model.layers.0.self_attn.q_proj"
    twice = {f"{name}.weight_scale": torch.ones(rows, 1), f"{name}.weight_offset": torch.zeros(rows, 1)}
    edit_weights(tmp_path, **twice, **{f"{name}.bias": torch.full((rows,), 9.0)})
    check(tmp_path, model)


QKV = "model__layers__0__self_attn__"


@every(
    ("kind", "changes", "code", "reason"),
    [
        ("W8A8_DYNAMIC", {QKV + "k_proj__weight_offset": torch.eye(16, 1)}, "unsupported_quantization", "is not 0"),
        (
            "W8A8",
            {QKV + "k_proj__input_scale": torch.tensor([2 * STEP])},
            "unsupported_quantization",
            "q_proj.input_scale = 0.04, model.layers.0.self_attn.k_proj.input_scale = 0.08",
        ),
        (
            "W8A8",
            {QKV + "v_proj__input_offset": torch.tensor([7.0])},
            "unsupported_quantization",
            "v_proj.input_offset = 7",
        ),
        (
            "W8A8_DYNAMIC",
            {QKV + "o_proj__weight_scale": torch.full((48, 1), torch.nan)},
            "damaged",
            "o_proj.weight_scale",
        ),
        ("W8A8", {QKV + "o_proj__deq_scale": torch.full((48,), torch.inf)}, "damaged", "o_proj.deq_scale"),
        ("W8A8", {QKV + "o_proj__input_scale": torch.full((1,), torch.inf)}, "damaged", "o_proj.input_scale"),
        ("W8A8_DYNAMIC", {QKV + "o_proj__bias": torch.zeros(48)}, "unexpected_tensors", "o_proj.bias"),
        ("W8A8", {QKV + "o_proj__input_scale": torch.zeros(1)}, "unsupported_quantization", "not above 0"),
        ("W8A8", {QKV + "o_proj__weight": torch.zeros(48, 48)}, "dtype_mismatch", "stored as float32"),
        ("W8A8", {QKV + "o_proj__quant_bias": torch.zeros(48)}, "dtype_mismatch", "stored as float32, not as int32"),
        ("W8A8", {QKV + "o_proj__deq_scale": None}, "missing_tensors", "o_proj.deq_scale"),
        ("W8A8", {QKV + "o_proj__scale": torch.zeros(1)}, "unexpected_tensors", "o_proj.scale"),
    ],
)
def test_invalid_tensors_are_refused_by_name(
    kind: str, changes: dict[str, Tensor | None], code: str, reason: str, tmp_path: Path
) -> None:
    quantize(tmp_path, small_model("llama"), everything(kind))
    edit_weights(tmp_path, **changes)
    error = refused(tmp_path)
    assert error.code == code
    assert reason in error.reason


O_PROJ = QKV + "o_proj__"


@every(
    ("kind", "changes", "code", "part"),
    [
        ("W8A8_DYNAMIC", {"weight_scale": None}, "missing_tensors", "o_proj.weight_scale"),
        ("W8A8_DYNAMIC", {"weight_offset": None}, "missing_tensors", "o_proj.weight_offset"),
        ("W8A8_DYNAMIC", {"weight": None}, "missing_tensors", "o_proj.weight"),
        ("W8A8_DYNAMIC", {"weight": torch.ones(48, 48)}, "dtype_mismatch", "float32, not as int8"),
        (
            "W8A8_DYNAMIC",
            {"weight_scale": torch.ones(48, 1).int()},
            "dtype_mismatch",
            "weight_scale is stored as int32",
        ),
        ("W8A8_DYNAMIC", {"weight_scale": torch.ones(47, 1)}, "shape_mismatch", "need [48, 1]"),
        ("W8A8_DYNAMIC", {"weight": torch.ones(48, 40).to(torch.int8)}, "shape_mismatch", "a row of 48 per output"),
        ("W8A8_DYNAMIC", {"deq_scale": torch.ones(48)}, "unexpected_tensors", "o_proj.deq_scale"),
        ("W8A8_DYNAMIC", {"weight_scale": torch.full((48, 1), -1.0)}, "damaged", "weight_scale is negative"),
        ("W8A8_DYNAMIC", {"weight_scale": torch.zeros(48, 1)}, "unsupported_quantization", "weight_scale is 0 for all"),
        ("W8A8_DYNAMIC", {"weight_offset": torch.full((48, 1), torch.nan)}, "damaged", "weight_offset is not finite"),
        ("W8A8", {"deq_scale": None}, "missing_tensors", "o_proj.deq_scale"),
        ("W8A8", {"deq_scale": torch.ones(48, 1)}, "shape_mismatch", "need [48]"),
        ("W8A8", {"deq_scale": torch.full((48,), -1.0)}, "damaged", "deq_scale is negative"),
        ("W8A8", {"deq_scale": torch.zeros(48)}, "unsupported_quantization", "deq_scale is 0 for all"),
        ("W8A8", {"input_scale": torch.ones(1).int()}, "dtype_mismatch", "input_scale is stored as int32"),
        ("W8A8", {"input_scale": torch.full((1,), -1.0)}, "damaged", "input_scale is negative"),
        (
            "FLOAT",
            {"weight": torch.ones(48, 48, dtype=torch.int8)},
            "dtype_mismatch",
            "o_proj.weight is stored as int8",
        ),
        ("FLOAT", {"weight_scale": torch.ones(48, 1)}, "unexpected_tensors", "o_proj.weight_scale"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    kind: str, changes: dict[str, Tensor | None], code: str, part: str, tmp_path: Path
) -> None:
    """By a plan as well, if headers show it."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    others = everything("W8A8" if kind == "FLOAT" else kind)
    quantize(folder, small_model("llama"), lambda name: kind if name.endswith("o_proj") else others(name))
    edit_weights(folder, **{O_PROJ + name: tensor for name, tensor in changes.items()})
    error = refused(folder)
    assert (error.code, part in error.reason) == (code, True), error
    if code not in ("damaged", "unsupported_quantization"):  # which values show
        refusals = make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder)])).refusals
        assert [(refusal.code, error.reason in refusal.reason) for refusal in refusals] == [(code, True)], refusals


def test_kinds_that_differ_within_one_matrix_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), everything("W8A8_DYNAMIC"))
    described(tmp_path, **{"model.layers.1.self_attn.v_proj.weight": "FLOAT"})
    error = refused(tmp_path)
    assert error.code == "unsupported_quantization"
    assert "model.layers.1.self_attn.v_proj is FLOAT" in error.reason


def test_unknown_kinds_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), everything("W8A8"))
    described(tmp_path, **{"model.layers.1.mlp.up_proj.weight": "W4A8_DYNAMIC"})
    with pytest.raises(ModelError, match="W4A8_DYNAMIC") as caught:
        read_facts(tmp_path)
    assert caught.value.code == "unsupported_quantization"


@every("text", ["{", "[]"])
def test_a_damaged_description_is_refused(text: str, tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), everything("W8A8"))
    (tmp_path / DESCRIPTION).write_text(text)
    with pytest.raises(ModelError, match="JSON") as caught:
        read_facts(tmp_path)
    assert caught.value.code == "damaged"


def test_two_descriptions_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, small_model("llama"), everything("W8A8"))
    (tmp_path / "quant_model_description_w8a8.json").write_text("{}")
    with pytest.raises(ModelError, match="2 descriptions"):
        read_facts(tmp_path)


def test_the_class_of_transformers_computes_the_same(tmp_path: Path) -> None:
    model = small_model("llama")
    quantize(tmp_path, model, everything("W8A8"))
    native, wrapped = (our_logits(built(tmp_path, impl=impl), tokens_of(model, 12)) for impl in ("srv", "transformers"))
    torch.testing.assert_close(wrapped, native, atol=1e-3, rtol=1e-3)


def test_random_weights_of_every_kind(tmp_path: Path) -> None:
    """Dummy weights have the described kinds of layers too, and their products have a normal magnitude."""
    model = small_model("llama")
    quantize(tmp_path, model, mixed)
    (tmp_path / "model.safetensors").unlink()
    ours = built(tmp_path, load_format="dummy")
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    for kind in (DynamicInt8Linear, StaticInt8Linear):
        linear = next(module for module in ours.modules() if isinstance(module, kind))
        spread = float(linear(x).std()) / (0.02 * model.config.hidden_size**0.5)
        assert 0.8 < spread < 1.25
