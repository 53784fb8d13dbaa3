"""Arguments of quantized products have an effect: which kernel multiplies, and by which activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_small import engine, make_small, message, messages
from mxfp4_weights import write_gpt_oss

from srv.errors import Refusal, Rejection
from srv.planning.plan import make_plan
from srv.testing.engine import user_input
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

IMPLEMENTATIONS = {"native": "native", "torch_native": "torch (reference)"}


def refusals(folder: Path, *flags: str, device: str = "cpu:avx512") -> Sequence[Rejection]:
    try:
        return make_plan(user_input(["--device", device, "--model-path", str(folder), *flags])).refusals
    except Refusal as refusal:
        return refusal.rejections


@covers(*(f"fp8_gemm_backend={name}" for name in ("auto", *IMPLEMENTATIONS)), platform="cpu")
def test_fp8_gemm_backend(tmp_path: Path) -> None:
    """The implementation that is named multiplies; a plan, a launch and the engine agree on it."""
    small = make_small("llama", tmp_path / "small", num_hidden_layers=1)
    tokens: list[list[list[int]]] = []
    for name, implementation in {"auto": "native", **IMPLEMENTATIONS}.items():
        with engine(small, quantization="fp8", fp8_gemm_backend=name) as served:
            tokens.append([result.tokens for result in served.generate(messages(small.prompts))])
            planned, running = served.context.kernels, served.ready.kernels
        assert planned.differences(running) == {}
        actual = [kernel for kernel in planned.kernels if kernel.key.startswith("linear_fp8 ")]
        assert {kernel.name for kernel in actual} == {implementation}
        assert {kernel.slower for kernel in actual} == {""}
        assert all((kernel.because == "fp8_gemm_backend names it") == (name != "auto") for kernel in actual)
    assert tokens[0] == tokens[1] == tokens[2]

    online = ("--quantization", "fp8", "--fp8-gemm-backend")
    for device, names in (("cpu:avx512", "native, torch_native"), ("cuda:sm90", "triton, triton_fp8, torch_native")):
        (refused,) = refusals(small.folder, *online, "deep_gemm", device=device)
        assert (refused.code, refused.remedy) == ("unknown_backend", f"Available: {names}.")
    (refused,) = refusals(small.folder, *online, "torch_nativ")
    assert refused.remedy.startswith("Did you mean torch_native?")
    unfit = refusals(small.folder, *online, "native", "--dtype", "float16")
    assert {refusal.code for refusal in unfit} == {"op_missing"}
    assert "float16 is not one of" in unfit[0].reason
    assert "Leave out --fp8-gemm-backend" in unfit[0].remedy
    for flags in ((), ("--quantization", "fp8", "--model-impl", "transformers")):
        assert "inert" in [refusal.code for refusal in refusals(small.folder, "--fp8-gemm-backend", "native", *flags)]


@covers("mxfp4_moe_precision=default", "mxfp4_moe_precision=bf16", platform="cpu")
def test_mxfp4_moe_precision(tmp_path: Path) -> None:
    """With bf16, a backend that does not round activations to 8 bits computes the experts; others do not fit."""
    write_gpt_oss(tmp_path)
    dense = make_small("llama", tmp_path / "dense", num_hidden_layers=1)
    logprobs: dict[str, list[float]] = {}
    for value in ("default", "bf16", "named"):
        named = {"moe_runner_backend": "torch_native"}
        flags = named if value == "named" else {"mxfp4_moe_precision": value}
        with engine(dense, model_path=tmp_path, dtype="bfloat16", **flags) as served:
            (result,) = served.generate([message("a", dense.prompts[-1], 1, prompt_logprobs=1)])
            (experts,) = {name for key, name in served.ready.kernels.items() if key.startswith("experts_gguf ")}
        logprobs[value] = [entry.logprob for entry in result.prompt_logprobs]
        assert experts == ("native" if value == "default" else "torch_native")
    assert logprobs["bf16"] == logprobs["named"] != logprobs["default"]

    unrounded = ("--mxfp4-moe-precision", "bf16")
    assert refusals(tmp_path, *unrounded) == ()
    (refused,) = refusals(tmp_path, *unrounded, "--moe-runner-backend", "native")
    assert (refused.code, "to 8 bits" in refused.reason) == ("backend_unfit", True)
    (refused,) = refusals(tmp_path, *unrounded, "--dtype", "float32")
    assert (refused.what, refused.code) == ("mxfp4_moe_precision", "excluded")
    for folder, more in ((dense.folder, ("--dtype", "bfloat16")), (tmp_path, ("--model-impl", "transformers"))):
        assert "inert" in [refusal.code for refusal in refusals(folder, *unrounded, *more)]
