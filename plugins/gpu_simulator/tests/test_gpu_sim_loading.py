"""Loading: the simulated GPUs, what differs between vendors, and when loading is refused. Each test has a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def python(code: str, **variables: str) -> str:
    """The output of the code; the last line is the text of its exception, if any."""
    setup = f"import sys; sys.path.insert(0, {str(PACKAGE)!r})\n"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SRV_GPU_SIMULATOR")}
    environment = {**inherited, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
    command = [sys.executable, "-c", setup + code]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return (process.stdout + process.stderr).strip()


def test_the_cards_have_facts_of_their_architecture() -> None:
    from srv_gpu_simulator.cards import CARDS

    assert list(CARDS) == [
        "sm80",
        "sm86",
        "sm89",
        "sm90",
        "sm100",
        "sm120",
        "gfx942",
        "gfx950",
        "gfx1100",
        "pvc",
        "bmg",
    ]
    assert all(card.device_name.endswith("(simulated)") for card in CARDS.values())
    assert {key: CARDS[key].capability for key in ("sm86", "sm120", "gfx942", "gfx950", "gfx1100")} == {
        "sm86": (8, 6),
        "sm120": (12, 0),
        "gfx942": (9, 4),
        "gfx950": (9, 5),
        "gfx1100": (11, 0),
    }
    assert {key: CARDS[key].memory >> 30 for key in ("sm80", "sm100", "gfx942", "pvc", "bmg")} == {
        "sm80": 80,
        "sm100": 180,
        "gfx942": 192,
        "pvc": 64,
        "bmg": 12,
    }


def test_an_amd_gpu_has_torch_cuda_and_aiter() -> None:
    code = """
import srv_gpu_simulator as s
gpu = s.load()
cuda, properties = gpu.accelerator, gpu.accelerator.get_device_properties()
print(properties.gcnArchName.split(":")[0], properties.warp_size, cuda.get_device_capability(), gpu.flashinfer)
print(gpu.aiter is not None, hasattr(cuda, "CUDAGraph"), hasattr(cuda, "default_stream"), cuda.asynchronous)
"""
    text = python(code, SRV_GPU_SIMULATOR="gfx950", SRV_GPU_SIMULATOR_ASYNCHRONOUS="1")
    assert text.splitlines() == ["gfx950 64 (9, 5) None", "True True True True"]


def test_an_intel_gpu_has_what_torch_xpu_has() -> None:
    code = """
import torch, srv_gpu_simulator as s
gpu = s.load("bmg")
xpu, properties = gpu.accelerator, gpu.accelerator.get_device_properties(0)
print(properties.gpu_subslice_count, properties.has_fp64, hasattr(properties, "multi_processor_count"))
print(hasattr(xpu, "default_stream"), hasattr(xpu, "CUDAGraph"), gpu.flashinfer, gpu.aiter)
graph, x = xpu.XPUGraph(), torch.ones(3, device="gpusim")
with xpu.graph(graph, pool=xpu.graph_pool_handle()):
    y = x + 1
graph.replay()
print(y.cpu().tolist())
"""
    assert python(code).splitlines() == ["20 True False", "False False None None", "[2.0, 2.0, 2.0]"]


def test_loading_refuses() -> None:
    code = """
import srv_gpu_simulator as s
print("torch" in sys.modules)
for act in (
    lambda: s.load("sm70"),
    lambda: s.load(),
    lambda: (s.load("sm90", memory=1 << 20), s.load("sm90", memory=1 << 20), s.load("sm80")),
    lambda: s.register_triton_operators(s.load("sm90", memory=1 << 20).accelerator),
):
    try:
        act()
    except (ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")
"""
    assert python(code, TRITON_INTERPRET="0").splitlines() == [
        "False",
        "ValueError: the GPU simulator knows no GPU 'sm70'; it simulates sm80, sm86, sm89, sm90, sm100, sm120, gfx942, "
        "gfx950, gfx1100, pvc, bmg",
        "ValueError: the GPU simulator was given no GPU; set SRV_GPU_SIMULATOR to one, for instance sm90",
        "RuntimeError: the GPU simulator was loaded as 'sm90' with 1048576 bytes here, and cannot become 'sm80' with "
        "85899345920 bytes: one process simulates one GPU",
        "RuntimeError: a simulated GPU runs Triton kernels in Triton's interpreter; set TRITON_INTERPRET=1 before the "
        "start of Python",
    ]


def test_another_backend_is_named() -> None:
    code = (
        "import torch; torch.utils.rename_privateuse1_backend('other'); import srv_gpu_simulator as s; s.load('sm90')"
    )
    assert python(code).splitlines()[-1] == (
        "RuntimeError: the GPU simulator cannot be loaded: PyTorch's one PrivateUse1 backend is 'other' in this "
        "process already, and that cannot be undone. Load it in a process of its own."
    )
