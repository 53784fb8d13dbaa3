"""The tools that FlashInfer and aiter compile with: what probes find, and what selection makes of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from every import every
from rules_world import device, fit, model

from srv.args.resolve import resolve
from srv.args.statement import UserInput
from srv.platform.registry import find_platforms
from srv.specs import FullAttention
from srv_gpu import tools

FLASHINFER = {"flashinfer-python": "0.7.2", "triton": "3.9"}
COMPILER = {"nvcc": "/usr/local/cuda/bin/nvcc", "ninja": "/usr/bin/ninja"}
AITER = {"amd-aiter": "0.1.9", "triton": "3.9"}
LONG_HEADS = model(head_dim=128, cache_groups=(FullAttention((0, 1, 2, 3), 8, 128, 128),))


def tool(folder: Path, name: str) -> Path:
    file = folder / "bin" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def test_a_home_variable_decides_then_the_path_then_the_usual_folder(tmp_path: Path) -> None:
    usual, on_path = tool(tmp_path / "usual", "nvcc"), tool(tmp_path / "path", "nvcc")
    home = tool(tmp_path / "home", "nvcc")

    def found(**environ: str) -> str | None:
        return tools.find_tool("nvcc", ("CUDA_HOME", "CUDA_PATH"), tmp_path / "usual", environ)

    assert found(PATH="/nowhere") == str(usual)
    assert found(PATH=str(on_path.parent)) == str(on_path)
    assert found(PATH=str(on_path.parent), CUDA_PATH=str(tmp_path / "home")) == str(home)
    assert found(PATH=str(on_path.parent), CUDA_HOME=str(tmp_path), CUDA_PATH=str(tmp_path / "home")) is None


def installed(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@every("distribution", ("triton", "triton-rocm", "triton-xpu", "pytorch-triton-rocm", "pytorch-triton-xpu", None))
def test_triton_is_found_whatever_its_distribution_is_called(
    distribution: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's indexes for AMD and Intel name it otherwise; without a distribution it may still be importable."""
    folder = tmp_path / str(distribution)
    folder.mkdir()
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if "site-packages" not in path)])
    assert tools.triton_version() == {}
    (folder / "triton").mkdir()
    (folder / "triton" / "__init__.py").touch()
    importlib.invalidate_caches()
    if distribution is not None:
        installed(folder, distribution, "3.7.1")
    assert tools.triton_version() == {"triton": "unknown" if distribution is None else "3.7.1"}


def test_probes_report_packages_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, ninja = tool(tmp_path / "cuda", "nvcc"), tool(tmp_path, "ninja")
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(tmp_path / "bin")}
    assert tools.flashinfer_tools(environ) == {}  # without the package, its tools do not matter
    installed(tmp_path, "flashinfer-python", "0.7.2")
    installed(tmp_path, "flashinfer-jit-cache", "0.7.2+cu129")
    monkeypatch.syspath_prepend(tmp_path)
    packages = {"flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.7.2+cu129"}
    assert tools.flashinfer_tools(environ) == {**packages, "nvcc": str(compiler), "ninja": str(ninja)}
    assert tools.flashinfer_tools({**environ, "FLASHINFER_DISABLE_JIT": "1"}) == packages
    flashinfer = tools.flashinfer_tools({**environ, "FLASHINFER_NVCC": "/opt/nvcc"})
    assert flashinfer["nvcc"] == "/opt/nvcc"


def test_prebuilt_modules_of_aiter_are_counted(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "bin"), "ROCM_PATH": str(tmp_path / "rocm")}
    (tmp_path / "aiter/jit").mkdir(parents=True)
    assert tools.AITER_MODULES not in tools.aiter_tools(environ, package=tmp_path / "aiter")
    (tmp_path / "aiter/jit/module_norm.so").touch()
    compiler = tool(tmp_path / "rocm", "hipcc")
    found_tools = tools.aiter_tools(environ, package=tmp_path / "aiter")
    assert (found_tools[tools.AITER_MODULES], found_tools["hipcc"]) == ("1", str(compiler))


@every(
    ("versions", "reason"),
    [
        ({}, None),  # a profile
        ({**FLASHINFER, **COMPILER}, None),
        ({**FLASHINFER, "flashinfer-jit-cache": "0.7.2+cu129"}, None),
        (FLASHINFER, "without nvcc and ninja, and has no prebuilt ones of its version (flashinfer-jit-cache is not"),
        ({**FLASHINFER, "ninja": "/usr/bin/ninja"}, "cannot compile its kernels without nvcc, and"),
        ({**FLASHINFER, "flashinfer-jit-cache": "0.6.18"}, "(flashinfer-jit-cache is 0.6.18)"),
        ({**FLASHINFER, "flashinfer-cubin": "0.7.2"}, "without nvcc and ninja"),
        (COMPILER, "the package flashinfer-python is not installed"),
    ],
)
def test_flashinfer_fits_where_it_can_compile_or_is_prebuilt(versions: dict[str, str], reason: str | None) -> None:
    on = device("cuda", "sm90", **versions)
    for family in ("attention", "sampling"):
        answer = fit(on, "cuda", family, "flashinfer", model())
        assert isinstance(answer, dict) if reason is None else reason in answer


@every(
    ("versions", "reason"),
    [
        ({}, None),
        ({**AITER, "hipcc": "/opt/rocm/bin/hipcc", "ninja": "/usr/bin/ninja"}, None),
        ({**AITER, tools.AITER_MODULES: "41"}, None),
        (AITER, "amd-aiter 0.1.9 cannot compile its modules without hipcc and ninja, and has no prebuilt ones"),
    ],
)
def test_aiter_fits_where_it_can_compile_or_is_prebuilt(versions: dict[str, str], reason: str | None) -> None:
    answer = fit(device("rocm", "gfx942", **versions), "rocm", "attention", "aiter", LONG_HEADS)
    assert isinstance(answer, dict) if reason is None else answer == reason


@every(
    ("platform", "profile", "versions", "attention"),
    [
        ("cuda", "sm90", FLASHINFER, "triton"),
        ("cuda", "sm90", {**FLASHINFER, **COMPILER}, "flashinfer"),
        ("rocm", "gfx942", AITER, "triton"),
        ("rocm", "gfx942", {**AITER, tools.AITER_MODULES: "41"}, "aiter"),
    ],
)
def test_a_backend_without_its_tools_is_passed_over_with_the_reason(
    platform: str, profile: str, versions: dict[str, str], attention: str
) -> None:
    manifest, on = find_platforms()[platform].loaded, device(platform, profile, **versions)
    result = resolve(UserInput(), manifest=manifest, device=on, model=LONG_HEADS)
    choice = result.backends["prefill_attention_backend"]
    assert choice.spec.name == attention
    rejected = [reason for _, reasons in choice.rejected for reason in reasons]
    assert any("without" in reason and "ninja" in reason for reason in rejected) == (attention == "triton")
