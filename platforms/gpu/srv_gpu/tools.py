"""Triton, FlashInfer and aiter, as installed, and the compilers and prebuilt kernels that the latter two need.

Torch-free, for probes and checks. FlashInfer and aiter compile their kernels when they are first called. The probe
reports what that takes as `DeviceFacts.versions`, and a backend that lacks it is passed over when backends are chosen,
before any request. A device profile has no versions, so that `srv plan` assumes a complete installation.

    flashinfer   flashinfer-jit-cache of its version (prebuilt), or nvcc and ninja. flashinfer-cubin has other kernels:
                 those of TensorRT-LLM and cuDNN, which srv does not call
    aiter        its prebuilt modules, or hipcc and ninja
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import is_installed, versions

# The package `triton` has a distribution of another name in torch's indexes for AMD and Intel, and had older ones.
_TRITON_DISTRIBUTIONS = ("triton", "triton-rocm", "triton-xpu", "pytorch-triton-rocm", "pytorch-triton-xpu")
FLASHINFER = "flashinfer-python"
JIT_CACHE = "flashinfer-jit-cache"
CUBINS = "flashinfer-cubin"
AITER = "amd-aiter"  # the package "aiter" of the public index is another project
AITER_MODULES = "prebuilt modules of amd-aiter"
_NO_COMPILER = "FLASHINFER_DISABLE_JIT"
_CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")
_ROCM_HOMES = ("ROCM_HOME", "ROCM_PATH", "HIP_PATH")


def triton_version() -> dict[str, str]:
    """The version of the package `triton` under the key "triton", whatever its distribution is called, or nothing.

    "unknown" for a package without a known distribution, such as a build from source on the import path.
    """
    if not is_installed("triton"):
        return {}
    installed = versions(*_TRITON_DISTRIBUTIONS)
    return {"triton": next((installed[name] for name in _TRITON_DISTRIBUTIONS if name in installed), "unknown")}


def find_tool(name: str, homes: tuple[str, ...], default: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """The path of a tool, or None.

    The first variable of `homes` that is set names the folder whose `bin` has it, as for the libraries that call it;
    without one, PATH is searched, and then `default`.
    """
    home = next((environ[variable] for variable in homes if environ.get(variable)), None)
    if home is not None:
        return shutil.which(name, path=str(Path(home) / "bin"))
    return shutil.which(name, path=environ.get("PATH", os.defpath)) or shutil.which(name, path=str(default / "bin"))


def find_ninja(environ: Mapping[str, str] = os.environ) -> str | None:
    """ninja on PATH, or beside this interpreter, where its Python package installs it."""
    path = environ.get("PATH", os.defpath)
    return shutil.which("ninja", path=path) or shutil.which("ninja", path=str(Path(sys.executable).parent))


def flashinfer_tools(
    environ: Mapping[str, str] = os.environ, default: Path = Path("/usr/local/cuda")
) -> dict[str, str]:
    """FlashInfer's packages by version, and the tools that it compiles with by path; what is missing is left out."""
    installed = versions(FLASHINFER, JIT_CACHE, CUBINS)
    if FLASHINFER not in installed or environ.get(_NO_COMPILER):
        return installed
    nvcc = environ.get("FLASHINFER_NVCC") or find_tool("nvcc", _CUDA_HOMES, default, environ)
    tools = {"nvcc": nvcc, "ninja": find_ninja(environ)}
    return installed | {name: path for name, path in tools.items() if path is not None}


def aiter_tools(
    environ: Mapping[str, str] = os.environ, default: Path = Path("/opt/rocm"), package: Path | None = None
) -> dict[str, str]:
    """aiter's version, whether its modules are prebuilt, and the tools that it compiles with by path.

    package: the folder of the package aiter, for tests; default: the installed one.
    """
    installed = versions(AITER)
    if AITER not in installed and package is None:
        return installed
    if package is None:
        spec = importlib.util.find_spec("aiter")
        package = None if spec is None or spec.origin is None else Path(spec.origin).parent
    built = 0 if package is None else sum(1 for _ in (package / "jit").glob("module_*.so"))
    if built:
        installed[AITER_MODULES] = str(built)
    tools = {"hipcc": find_tool("hipcc", _ROCM_HOMES, default, environ), "ninja": find_ninja(environ)}
    return installed | {name: path for name, path in tools.items() if path is not None}


def missing_flashinfer(device: DeviceFacts) -> list[str]:
    """Why FlashInfer cannot run: it is not installed, or has neither prebuilt kernels nor a compiler."""
    installed = device.versions
    if not installed:
        return []
    if FLASHINFER not in installed:
        return [f"the package {FLASHINFER} is not installed"]
    if _same_release(installed[FLASHINFER], installed.get(JIT_CACHE)):
        return []
    missing = [tool for tool in ("nvcc", "ninja") if tool not in installed]
    if not missing:
        return []
    cache = f"{JIT_CACHE} is {installed[JIT_CACHE]}" if JIT_CACHE in installed else f"{JIT_CACHE} is not installed"
    return [
        f"{FLASHINFER} {installed[FLASHINFER]} cannot compile its kernels without {' and '.join(missing)}, and has no"
        f" prebuilt ones of its version ({cache})"
    ]


def missing_aiter(device: DeviceFacts) -> list[str]:
    """Why aiter cannot run: it is not installed, or has neither prebuilt modules nor a compiler."""
    installed = device.versions
    if not installed:
        return []
    if AITER not in installed:
        return [f"the package {AITER} is not installed"]
    missing = [tool for tool in ("hipcc", "ninja") if tool not in installed]
    if AITER_MODULES in installed or not missing:
        return []
    return [
        f"{AITER} {installed[AITER]} cannot compile its modules without {' and '.join(missing)}, and has no"
        " prebuilt ones"
    ]


def _same_release(version: str, other: str | None) -> bool:
    """Whether two versions are equal up to their local part ("0.6.18" and "0.6.18+cu129")."""
    return other is not None and version.partition("+")[0] == other.partition("+")[0]
