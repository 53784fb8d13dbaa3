"""When a GPU quantizes activations to FP8: what a plan says of checkpoints, cards and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from every import every
from fp8_weights import FORMS, TORCHAO, compressed, write_fp8
from models_small import edit_config, small_model

from srv.planning.plan import LaunchPlan, make_plan
from srv.testing.engine import user_input

FAST = "triton_fp8"


def _plan(folder: Path, device: str, *arguments: str, dtype: str = "bfloat16") -> LaunchPlan:
    words = ["--device", device, "--model-path", str(folder), "--dtype", dtype, *arguments]
    return make_plan(user_input(words))


def _products(folder: Path, device: str, *arguments: str, dtype: str = "bfloat16") -> set[str | None]:
    plan = _plan(folder, device, *arguments, dtype=dtype)
    assert plan.refusals == ()
    return {kernel.name for kernel in plan.kernels.kernels if kernel.key.startswith("linear_fp8 ")}


WEIGHTS_ONLY = {
    **compressed("channel"),
    "config_groups": {"group_0": {**compressed("channel")["config_groups"]["group_0"]}},
}
WEIGHTS_ONLY["config_groups"]["group_0"]["input_activations"] = None
DYNAMIC = "Float8DynamicActivationFloat8WeightConfig"
# What a checkpoint states of the inputs of its FP8 weights -> the products on a GPU that multiplies FP8 by FP8.
STATED: dict[str, tuple[str, dict[str, Any] | None, str]] = {
    "dynamic": ("fp8, blocks", None, FAST),
    "static": ("fp8, static", None, FAST),
    "not stated": ("fp8, blocks", {"activation_scheme": None}, "triton"),
    "fbgemm": ("fbgemm_fp8", None, FAST),
    "per token": ("compressed-tensors, channel", None, FAST),
    "per tensor": ("compressed-tensors, tensor", None, FAST),
    "weights only": ("compressed-tensors, channel", WEIGHTS_ONLY, "triton"),
    "modelopt": ("modelopt, a file of its own", None, FAST),
    "modelopt, weights only": ("modelopt, blocks", None, "triton"),
    "torchao": ("torchao", {"quant_type": {"default": {"_type": DYNAMIC, "_data": {}}}}, FAST),
    "torchao, weights only": ("torchao", TORCHAO, "triton"),
}


@every("kind", STATED)
def test_checkpoints_that_were_made_for_it_have_quantized_activations(kind: str, tmp_path: Path) -> None:
    form, changes, expected = STATED[kind]
    folder = tmp_path / kind
    write_fp8(folder, FORMS[form], num_hidden_layers=1)
    if changes is not None:
        edit_config(folder, quantization_config={**(FORMS[form].config or {}), **changes})
    assert _products(folder, "cuda:sm90") == {expected}
    assert _products(folder, "cuda:sm90", "--fp8-gemm-backend", "auto") == {expected}


def test_cards_dtypes_and_arguments_decide_as_well(tmp_path: Path) -> None:
    write_fp8(tmp_path, FORMS["fp8, blocks"], num_hidden_layers=1)
    devices = {
        **dict.fromkeys(("cuda:sm89", "cuda:sm100", "cuda:sm120", "rocm:gfx950"), FAST),
        **dict.fromkeys(("cuda:sm80", "cuda:sm86", "rocm:gfx942", "rocm:gfx1100", "xpu:pvc"), "triton"),
    }
    assert {device: _products(tmp_path, device) for device in devices} == {
        device: {name} for device, name in devices.items()
    }
    assert _products(tmp_path, "cuda:sm90", dtype="float32") == {"triton"}
    assert _products(tmp_path, "cuda:sm90", "--fp8-gemm-backend", "triton") == {"triton"}
    assert _plan(tmp_path, "cuda:sm90", "--model-impl", "transformers").refusals == ()  # for a default without effect

    plan = _plan(tmp_path, "cuda:sm90")
    assert "the checkpoint states activations in FP8" in plan.resolved.provenance["fp8_gemm_backend"].reason
    refused = _plan(tmp_path, "cuda:sm80", "--fp8-gemm-backend", FAST).refusals
    assert {rejection.code for rejection in refused} == {"op_missing"}
    assert "sm80 has no matrix units for float8_e4m3fn" in refused[0].reason
    assert "Leave out --fp8-gemm-backend" in refused[0].remedy


def test_weights_that_are_quantized_at_load_have_exact_activations_unless_the_user_asks(tmp_path: Path) -> None:
    small_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    online = ("--quantization", "fp8")
    assert _products(tmp_path, "cuda:sm90", *online) == {"triton"}
    assert _products(tmp_path, "cuda:sm90", *online, "--fp8-gemm-backend", FAST) == {FAST}
    assert _products(tmp_path, "cuda:sm90") == set()
