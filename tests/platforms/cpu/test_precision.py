"""Products with blocks of 4-bit weights whose activations are not rounded: kernels, plans and what a server binds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every import every
from models_small import small_model
from stored_orders import made, stored_form, write_stored
from torch import Tensor

from srv.planning.plan import LaunchPlan, make_plan
from srv.testing.engine import LocalEngine, user_input
from srv_cpu.op_specs import NATIVE, NATIVE_FULL
from srv_kernels import oracles
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native kernels are not built")
FLAG = "--activation-precision"
FULL = (FLAG, "full")
WEIGHTS = ("AWQ", "awq"), ("GPTQ with an order of inputs", "gptq in another order")


def plan(folder: Path, *more: str) -> LaunchPlan:
    return make_plan(user_input(["--device", "cpu:avx512", "--model-path", str(folder), *more]))


def of_op(launch_plan: LaunchPlan, op: str) -> set[str | None]:
    return {kernel.name for kernel in launch_plan.kernels.kernels if kernel.key.startswith(f"{op} ")}


def rows(quant_type: str, outputs: int, inputs: int) -> Tensor:
    import gguf

    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
    return torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[quant_type]))


@every("quant_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_float32(quant_type: str, dtype: torch.dtype) -> None:
    """Of a few rows, and of more weights than are dequantized at a time."""
    from srv_kernels.cpu import native_ops

    outputs, inputs = 2100, 256
    stored = rows(quant_type, outputs, inputs)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = x.double() @ oracles.dequantize_rows(stored, quant_type).double().T
    wide = native_ops.full_linear_gguf_float32(x, stored, quant_type)
    assert wide.dtype is torch.float32
    scale = exact.abs().max()
    assert (wide - exact).abs().max() <= 1e-6 * scale
    once = max(1e-6, torch.finfo(dtype).eps)  # by which rounding the sums to the dtype changes them
    assert (native_ops.full_linear_gguf(x, stored, quant_type) - exact).abs().max() <= once * scale
    rounded = native_ops.linear_gguf_float32(x, stored, quant_type)
    assert (rounded - exact).abs().max() > 1e-4 * scale, "the other kernel rounds x, so that this test can fail"


@every(("name", "form"), WEIGHTS)
def test_plans_say_what_rounds_and_a_user_may_forbid_it(name: str, form: str, tmp_path: Path) -> None:
    folder = tmp_path / form
    write_stored(folder, made("phi3"), stored_form(form))
    usual, full = plan(folder), plan(folder, *FULL)
    assert of_op(usual, "linear_gguf") == {NATIVE}
    (note,) = [note for note in usual.notes if note.startswith("precision")]
    assert "rounds activations to 8 bits in linear_gguf" in note
    assert "--activation-precision full" in note
    assert of_op(full, "linear_gguf") == {NATIVE_FULL}
    assert [note for note in full.notes if note.startswith("precision")] == []
    assert (usual.refusals, full.refusals) == ((), ())


def test_experts_are_computed_by_the_backend_that_does_not_round(tmp_path: Path) -> None:
    write_stored(tmp_path, made("gpt_oss"), stored_form("awq"))
    assert of_op(plan(tmp_path), "experts_gguf") == {NATIVE}
    full = plan(tmp_path, *FULL)
    assert of_op(full, "experts_gguf") == {"torch_native"}
    assert full.refusals == ()


@every(
    ("form", "kind", "code"),
    [
        ("", "llama", "inert"),
        ("compressed-tensors, channel", "llama", "inert"),  # FP8: nothing rounds its activations
        ("int8", "qwen3_moe", "unsupported"),
        ("int8", "llama", ""),
    ],
)
def test_a_value_without_effect_is_refused(form: str, kind: str, code: str, tmp_path: Path) -> None:
    folder, model = tmp_path / f"{form} {kind}", small_model(kind)
    if form:
        write_stored(folder, model, stored_form(form))
    else:
        model.save_pretrained(folder)
    codes = [refusal.code for refusal in plan(folder, *FULL).refusals if refusal.what == "activation_precision"]
    assert codes == ([code] if code else [])


@covers("activation_precision=int8", "activation_precision=full", platform="cpu")
def test_activation_precision(tmp_path: Path) -> None:
    write_stored(tmp_path, made("phi3"), stored_form("awq"))
    bound = {"int8": NATIVE, "full": NATIVE_FULL}
    for value, name in bound.items():
        arguments = ["--device", "cpu", "--model-path", str(tmp_path), "--dtype", "float32", FLAG, value]
        with LocalEngine.launch([*arguments, "--max-total-tokens", "256"]) as engine:
            running = engine.ready.kernels
            assert running == {kernel.key: kernel.name for kernel in engine.context.kernels.kernels}
        assert {kernel for key, kernel in running.items() if key.startswith("linear_gguf ")} == {name}
