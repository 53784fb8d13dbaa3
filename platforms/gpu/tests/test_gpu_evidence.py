"""Evidence for the cells of the GPU platforms in the support matrix, on a GPU or on that which SRV_GPU_SIMULATOR names.

    SRV_GPU_SIMULATOR=sm90 python -m pytest -m covers --srv-evidence FILE --srv-evidence-device cuda THIS_FILE

What runs is the conformance kit, check by check. On a real device the level is E4. On a simulated one it is E3, and a
cell says "simulated"; it says "compiled" if the only evidence is that kernels compile ahead of time for the GPU, with
Triton's own compiler.
"""

from __future__ import annotations

import json
import os
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bfloat16_models import MODELS
from model_cells import assert_as_close_as_transformers, requests, save_bfloat16, served

from srv.testing.conformance import attention, sampler
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Level
from srv.testing.conformance.runner import run
from srv.testing.conformance.setups import sampling_backends
from srv_gpu.simulator import VARIABLE
from srv_kernels.contracts import CONTRACTS, violations
from srv_matrix.pytest_plugin import covers

COMPILED = "compiled"
LENGTHS = (1, 5, 20)  # of prompts
DTYPES = ("float32", "bfloat16", "float16")
TRITON_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# The kernels of each op and backend, by their names in compiled.json.
KERNELS = {
    "op:rms_norm": ("norms._rms_norm",),
    "op:add_rms_norm": ("norms._add_rms_norm",),
    "op:rotary": ("rotary._rotary",),
    "op:silu_and_mul": ("activations._gated",),
    "op:gelu_tanh_and_mul": ("activations._gated",),
    "op:linear_w8a8": ("int8_linear.quantize_rows_kernel", "int8_linear.int8_gemm_kernel"),
    "op:linear_w8a8_static": ("int8_linear.quantize_static_kernel", "int8_linear.int8_gemm_kernel"),
    "op:linear_int8": ("int8_linear.int8_gemm_kernel",),
    "op:linear_fp8": ("fp8_linear.fp8_gemm_kernel",),
    "op:linear_float32": ("dense_linear.dense_gemm_kernel",),
    "op:linear_gguf": ("gguf_linear.gguf_gemv_kernel", "gguf_linear.gguf_gemm_kernel"),
    "op:linear_gguf_float32": ("gguf_linear.gguf_gemv_kernel", "gguf_linear.gguf_gemm_kernel"),
    "op:rows_gguf": ("gguf_linear.gguf_rows_kernel",),
    "op:experts": ("moe_gemm.gate_up_kernel", "moe_gemm.down_kernel"),
    "op:experts_int8": ("moe_gemm.gate_up_kernel", "moe_gemm.down_kernel"),
    "op:experts_fp8": ("moe_fp8.moe_fp8_kernel",),
    "op:experts_gguf": ("moe_gguf.moe_gguf_kernel",),
    "op:route_experts": ("moe_routing.route_kernel",),
}
# What a check of the engine is evidence for.
ENGINE = {
    "engine.greedy": ("dtype=float32", "disable_graphs=true"),
    "engine.bfloat16": ("model:LlamaForCausalLM/safetensors", "dtype=bfloat16"),
    "engine.float16": ("dtype=float16",),
    "engine.w8a8": ("quantization=modelslim",),
    "engine.prefix_cache": ("disable_radix_cache=false",),
    "engine.no_prefix_cache": ("disable_radix_cache=true",),
    "engine.no_overlap": ("disable_overlap_schedule=true",),
}
ENGINE_OF_CUDA_AND_ROCM = {"engine.graphs": ("disable_graphs=false",)}
CELLS = [(op, dtype) for op in CONTRACTS if f"op:{op}" in KERNELS for dtype in DTYPES]
COMPILED_CELLS = [cell for cell in CELLS if cell != ("experts_gguf", "float16")]  # that the table has no variant of
IN_FLOAT32 = "route_experts"  # its kernel reads and writes no other floats, whatever the model's dtype is
# The libraries of experts, which are stand-ins on a simulated GPU.
EXPERT_LIBRARIES = {"cuda": "flashinfer_cutlass", "rocm": "aiter"}


@pytest.fixture(scope="module")
def kit(srv_device: str, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """The platform on the device under test, initialized in this process."""
    test_kit = Kit(srv_device, tmp_path_factory.mktemp("kit"))
    assert test_kit.platform.name == srv_device
    return test_kit


@pytest.mark.parametrize(
    ("op", "dtype"), [pytest.param(op, dtype, marks=covers(f"op:{op}/{dtype}")) for op, dtype in CELLS]
)
def test_the_kernels_of_an_op_satisfy_its_contract(kit: Kit, op: str, dtype: str) -> None:
    (impl,) = [candidate for candidate in kit.platform.ops if candidate.op == op and candidate.name == "triton"]
    function = pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target
    assert violations(CONTRACTS[op], function, getattr(torch, dtype), kit.device) == []


def _attention_is_right(kit: Kit, backend: str) -> None:
    """Mixed steps by every backend that fits, of which `backend` must be one."""
    assert f"{backend}, " in attention.mixed(kit)


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=covers(f"attention_backend={name}")) for name in ("triton", "torch_native")]
)
def test_attention(kit: Kit, backend: str) -> None:
    _attention_is_right(kit, backend)


@pytest.fixture
def device_under_test(request: pytest.FixtureRequest) -> str:
    """As `srv_device`, for tests whose marks name their platform."""
    return str(request.config.getoption("--srv-evidence-device"))


def _only_on(platform: str, device: str) -> None:
    if device != platform:
        pytest.skip(f"runs on {platform}; this run is on {device}")


def _only_with_stand_ins() -> None:
    if VARIABLE not in os.environ:
        pytest.skip("the simulator's stand-in is not there on a real GPU")


@covers("attention_backend=flashinfer", platform="cuda", note="stand-in")
def test_attention_of_flashinfer(device_under_test: str, tmp_path: Path) -> None:
    _only_on("cuda", device_under_test)
    _only_with_stand_ins()
    _attention_is_right(Kit("cuda", tmp_path), "flashinfer")


@covers("attention_backend=aiter", platform="rocm", note="stand-in")
def test_attention_of_aiter(device_under_test: str, tmp_path: Path) -> None:
    _only_on("rocm", device_under_test)
    _only_with_stand_ins()
    _attention_is_right(Kit("rocm", tmp_path), "aiter")


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=covers(f"sampling_backend={name}")) for name in ("triton", "pytorch")]
)
def test_sampling(kit: Kit, backend: str) -> None:
    assert backend in dict(sampling_backends(kit))
    sampler.exact(kit)
    sampler.filter_order(kit)


def _passes(device: str, check: str) -> None:
    """The check in processes of its own, in which the engine claims the device."""
    (outcome,) = run(device, Level.L3, only=[check]).outcomes
    assert outcome.status == "passed", f"{outcome.message} {outcome.remedy}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [pytest.param(name, marks=covers(*cells)) for name, cells in ENGINE.items()])
def test_the_engine(srv_device: str, check: str) -> None:
    _passes(srv_device, check)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("platform", "check"),
    [
        pytest.param(platform, name, marks=covers(*cells, platform=platform))
        for platform in ("cuda", "rocm")
        for name, cells in ENGINE_OF_CUDA_AND_ROCM.items()
    ],
)
def test_the_engine_with_graphs(device_under_test: str, platform: str, check: str) -> None:
    _only_on(platform, device_under_test)
    _passes(platform, check)


def _serves_a_mixture(device: str, backend: str, computes: str, folder: Path) -> None:
    """A bfloat16 checkpoint; `computes`: the backend that has to be reported for its experts."""
    with torch.inference_mode(False):
        model = MODELS["Qwen3MoeForCausalLM"].made()
        save_bfloat16(model, folder)
        flags = ("--max-total-tokens=1024", "--disable-graphs", f"--moe-runner-backend={backend}")
        with served(folder, *flags, device=device) as engine:
            results = engine.generate(requests(LENGTHS, prompt_logprobs=0))
            running = {name for key, name in engine.ready.kernels.items() if key.startswith("experts ")}
        assert running == {computes}
        assert_as_close_as_transformers(results, model, lengths=LENGTHS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=covers(f"moe_runner_backend={name}")) for name in ("triton", "torch_native")]
)
def test_a_mixture_of_experts(srv_device: str, backend: str, tmp_path: Path) -> None:
    _serves_a_mixture(srv_device, backend, backend, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        pytest.param(platform, name, marks=covers(f"moe_runner_backend={name}", platform=platform, note="stand-in"))
        for platform, name in EXPERT_LIBRARIES.items()
    ],
)
def test_a_mixture_by_a_library(device_under_test: str, platform: str, backend: str, tmp_path: Path) -> None:
    _only_on(platform, device_under_test)
    _only_with_stand_ins()
    _serves_a_mixture(platform, backend, backend, tmp_path)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """The kernels of the committed table whose source is the current one."""
    from srv_kernels.triton import compile as ahead

    current, table = ahead._listing()["kernels"], json.loads(ahead.TABLE.read_text(encoding="utf-8"))["kernels"]
    return {name: entry for name, entry in table.items() if entry["source"] == current[name]["source"]}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [pytest.param(op, dtype, marks=covers(f"op:{op}/{dtype}", note=COMPILED)) for op, dtype in COMPILED_CELLS],
)
def test_the_kernels_of_an_op_compile(
    srv_device: str, kit: Kit, compiled: dict[str, dict[str, Any]], op: str, dtype: str
) -> None:
    """For this generation of GPUs: the table of `srv_kernels.triton.compile` has their registers and shared memory."""
    if srv_device == "xpu":
        pytest.skip("Triton's wheel has no compiler for XPU")
    floats = TRITON_DTYPES["float32" if op == IN_FLOAT32 else dtype]
    for kernel in KERNELS[f"op:{op}"]:
        variants = compiled[kernel]["variants"]
        ours = [label for label in variants if floats in label.partition(" ")[0].split(",")]
        assert any(kit.device_facts.variant in variants[label] for label in ours), (kernel, dtype)
