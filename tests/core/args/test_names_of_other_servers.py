"""Values that other servers have for what srv has under another name: methods of weights, dtypes, formats."""

from __future__ import annotations

from pathlib import Path

import torch
from every import every
from fp8_weights import FORMS as FP8_FORMS
from fp8_weights import write_fp8
from mixed_weights import config_of, of_int8, write_mixed
from models_small import built, small_model
from packed_weights import AWQ, compressed, gptq, write_packed

from srv.errors import Rejection
from srv.planning.plan import LaunchPlan, make_plan
from srv.quantization.layers.blocks import GGUFLinear
from srv.quantization.layers.fp8 import Fp8Linear
from srv.testing.engine import user_input


def planned(folder: Path, *arguments: str) -> LaunchPlan:
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *arguments]))


def checkpoints(folder: Path) -> dict[str, Path]:
    """One of each method, by its name, and one of compressed-tensors whose method has another name here."""
    write_packed(folder / "awq", AWQ, num_hidden_layers=1)
    write_packed(folder / "gptq", gptq(), num_hidden_layers=1)
    write_packed(folder / "compressed-tensors", compressed(), num_hidden_layers=1)
    write_fp8(folder / "fp8", FP8_FORMS["fp8, static"], num_hidden_layers=1)
    write_fp8(folder / "modelopt", next(form for form in FP8_FORMS.values() if form.method == "modelopt"))
    write_mixed(folder / "int8", {"_proj": of_int8()}, config_of({("Linear",): of_int8()}, "int-quantized"))
    return {path.name: path for path in folder.iterdir()}


NAMES = {
    "awq": {"awq", "awq_marlin", "marlin", "moe_wna16"},
    "gptq": {"gptq", "gptq_marlin", "marlin", "moe_wna16"},
    "compressed-tensors": {"compressed-tensors"},
    "fp8": {"fp8", "w8a8_fp8"},
    "modelopt": {"modelopt", "modelopt_fp8", "modelopt_fp4"},
    "int8": {"w8a8_int8", "compressed-tensors"},
}
CALLED = {"int8": "w8a8_int8"}


def test_a_method_has_the_names_of_the_kernels_that_read_its_weights(tmp_path: Path) -> None:
    """The method of the checkpoint must agree, and errors name that method."""
    for method, folder in checkpoints(tmp_path).items():
        plain = planned(folder)
        assert plain.refusals == ()
        for name in sorted(set().union(*NAMES.values())):
            plan = planned(folder, "--quantization", name)
            if name in NAMES[method]:
                assert (plan.refusals, plan.budget) == ((), plain.budget), name
                continue
            first = plan.refusals[0]
            assert (first.what, first.code) == ("quantization", "other_method"), (method, name)
            assert first.reason.endswith(f"are quantized with {CALLED.get(method, method)}")
            assert not any(f"quantized with {name}" in refusal.reason for refusal in plan.refusals), plan.refusals


@every("name", ["marlin", "moe_wna16", "awq"])
def test_the_layers_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    write_packed(folder, AWQ, num_hidden_layers=1)
    assert any(isinstance(layer, GGUFLinear) for layer in built(folder, quantization=name).modules())


def test_unquantized_weights_become_fp8_by_either_name(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    assert planned(tmp_path, "--quantization", "w8a8_fp8").refusals == ()
    assert any(isinstance(layer, Fp8Linear) for layer in built(tmp_path, quantization="fp8").modules())
    for name in ("awq_marlin", "marlin", "modelopt_fp8"):
        (refusal, *_) = planned(tmp_path, "--quantization", name).refusals
        assert (refusal.code, "are not quantized" in refusal.reason) == ("other_method", True)


def test_a_planned_method_is_not_said_to_be_that_of_the_weights(tmp_path: Path) -> None:
    write_packed(tmp_path, AWQ, num_hidden_layers=1)
    reasons = {refusal.code: refusal.reason for refusal in planned(tmp_path, "--quantization", "qoq").refusals}
    assert "planned" in reasons
    assert not any("quantized with qoq" in reason for reason in reasons.values())


@every(("name", "dtype"), [("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")])
def test_dtypes_of_a_pool_have_the_names_of_other_servers(name: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    small_model("llama", dtype=torch.bfloat16).save_pretrained(folder)
    plan = planned(folder, "--kv-cache-dtype", name)
    assert plan.refusals == ()
    assert plan.resolved.provenance["kv_cache_dtype"].value == dtype


def test_a_format_that_is_recognised_needs_no_value(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    refusals: dict[str, Rejection] = {
        refusal.code: refusal for refusal in planned(tmp_path, "--load-format", "bitsandbytes").refusals
    }
    assert "recognised by their configuration and need no value" in refusals["planned"].reason
