"""The results of the built-in probes on other machines, whose files, drivers and builds of torch are simulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from every import every

from srv.platform.host import torch_build
from srv_cpu import probe as cpu
from srv_cuda import probe as cuda
from srv_npu import probe as npu

GIB = 1 << 30
AVX2 = "fpu sse4_2 avx avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni"
AMX = f"{AVX512} avx512_bf16 amx_tile amx_bf16 amx_int8"


def machine(root: Path, flags: str | None, *, memory_kib: int = 8 << 20, label: str = "flags") -> Path:
    (root / "proc/self").mkdir(parents=True)
    if flags is not None:
        text = f"processor\t: 0\nmodel name\t: Example CPU\n{label}\t\t: {flags}\n\nprocessor\t: 1\n"
        (root / "proc/cpuinfo").write_text(text)
    (root / "proc/meminfo").write_text(f"MemTotal:       {memory_kib} kB\nMemFree: 1 kB\n")
    return root


@every(
    ("flags", "variant", "features"),
    [
        (AVX2, "avx2", ()),
        (AVX512, "avx512", ("avx512_vnni",)),
        (f"{AVX512} avx512_bf16", "avx512", ("avx512_bf16", "avx512_vnni")),
        (AMX, "amx", ("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")),
    ],
)
def test_cpu_variant_from_flags(tmp_path: Path, flags: str, variant: str, features: tuple[str, ...]) -> None:
    device = cpu.look(machine(tmp_path, flags), "x86_64").device
    assert device is not None
    assert (device.variant, device.features, device.name) == (variant, features, "Example CPU")
    assert device.memory_bytes == 8 * GIB


def test_cpu_of_arm(tmp_path: Path) -> None:
    device = cpu.look(machine(tmp_path, "fp asimd bf16 i8mm", label="Features"), "aarch64").device
    assert device is not None
    assert (device.variant, device.features) == ("neon", ("bf16", "i8mm"))


def test_cpu_without_vector_units_is_refused(tmp_path: Path) -> None:
    result = cpu.look(machine(tmp_path, "fpu sse2"), "x86_64")
    assert (result.available, result.code) == (False, "unsupported_variant")
    assert "Example CPU" in result.reason


def test_cpu_that_shows_no_flags_is_taken_for_avx2_with_a_note(tmp_path: Path) -> None:
    result = cpu.look(machine(tmp_path, None), "x86_64")
    assert result.device is not None
    assert result.device.variant == "avx2"
    assert "is assumed" in result.notes[0]


@every(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": str(3 * GIB)}, 3),
        ("0::/a/b\n", {"a/memory.max": str(2 * GIB), "a/b/memory.max": "max"}, 2),
        ("0::/host/path\n", {"memory.max": str(GIB)}, 1),
        ("4:memory:/box\n", {"memory/box/memory.limit_in_bytes": str(5 * GIB)}, 5),
        ("4:memory:/box\n", {"memory/box/memory.limit_in_bytes": str(2**63 - 4096)}, 8),
        ("0::/\n", {"memory.max": "max"}, 8),
        ("", {}, 8),
    ],
)
def test_cpu_memory_is_what_the_control_group_leaves(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    root = machine(tmp_path, AVX2)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cpu.memory_limit(root) == expected * GIB


H100 = ("NVIDIA H100 80GB HBM3", 80 * GIB, 9, 0)


@every(
    ("driver", "build", "code", "message"),
    [
        (cuda.Driver((12, 8), ()), {"cuda": "12.8"}, "no_device", "CUDA_VISIBLE_DEVICES"),
        (cuda.Driver((12, 8), (H100,)), {"cuda": None}, "torch_without_cuda", "built for CPUs only, not for CUDA"),
        (cuda.Driver((12, 8), (H100,)), {"hip": "6.4"}, "torch_without_cuda", "built for ROCm 6.4, not for CUDA"),
        (cuda.Driver((11, 4), (H100,)), {"cuda": "12.8"}, "driver_too_old", "CUDA 11.4 at most"),
    ],
)
def test_cuda_reports_what_is_missing(
    driver: cuda.Driver, build: dict[str, str | None], code: str, message: str
) -> None:
    result = cuda.judge(driver, build)
    assert (result.available, result.code) == (False, code)
    assert message in f"{result.reason} {result.remedy}"


def test_cuda_describes_its_devices() -> None:
    result = cuda.judge(cuda.Driver((12, 8), (H100, H100)), {"cuda": "12.6"})
    device = result.device
    assert result.available
    assert device is not None
    assert not device.simulated
    assert (device.variant, device.count, device.memory_bytes) == ("sm90", 2, 80 * GIB)
    assert device.versions["driver (CUDA)"] == "12.8"


def test_cuda_notes_an_unknown_variant_and_unequal_devices() -> None:
    old = ("NVIDIA T4", 15 * GIB, 7, 5)
    result = cuda.judge(cuda.Driver((12, 8), (old, H100)), {"cuda": "12.6"})
    assert result.device is not None
    assert (result.device.variant, result.device.memory_bytes) == ("sm75", 15 * GIB)
    assert len(result.notes) == 2


@every(
    ("wheel", "driver", "code", "message"),
    [
        (False, False, "torch_npu_missing", "no Ascend driver is here either"),
        (False, True, "torch_npu_missing", "torch_npu is not installed"),
        (True, False, "driver_missing", "davinci_manager is missing"),
    ],
)
def test_npu_distinguishes_wheel_and_driver(tmp_path: Path, wheel: bool, driver: bool, code: str, message: str) -> None:
    if driver:
        (tmp_path / "davinci_manager").touch()
    result = npu.missing_part(tmp_path, wheel)
    assert result is not None
    assert result.code == code
    assert message in result.reason


def test_npu_has_no_refusal_with_wheel_and_driver(tmp_path: Path) -> None:
    (tmp_path / "davinci_manager").touch()
    assert npu.missing_part(tmp_path, has_wheel=True) is None


def test_npu_wheel_without_its_toolkit_is_explained(tmp_path: Path) -> None:
    """A torch_npu that fails as the real one does without CANN, under a probe that found the driver."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file\\nmore')")
    (tmp_path / "davinci_manager").touch()
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from pathlib import Path
from srv.platform.manifest import ProbeContext
from srv_npu import probe
probe._DEV = Path({str(tmp_path)!r})
result = probe.probe(ProbeContext(5))
print(result.code, "|", result.reason)
"""
    environment = {name: value for name, value in os.environ.items() if name != "SRV_NPU_SIMULATOR"}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == (
        "toolkit_missing | torch_npu is installed but cannot be loaded: libhccl.so: cannot open shared object file"
    )


def test_torch_settings_are_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("from typing import Optional\ncuda: Optional[str] = '12.8'\nhip = None\n")
    assert torch_build(tmp_path) == {"cuda": "12.8", "hip": None}
    assert torch_build(tmp_path / "nowhere") == {}
