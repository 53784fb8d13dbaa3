"""The native kernels of aarch64, cross-compiled and run by an emulator.

Results are tested on a processor with int8 and bfloat16 dot products (Armv8.6) and on one without. Speed is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from compiling import COMPILING_S
from every import every

from srv_kernels.cpu import build

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
KERNELS = (
    *("linear", "linear, int8", "linear, FP8", "linear, w8a8", "rms_norm", "silu_and_mul", "rotary"),
    *("route", "experts", "experts, blocks", "most likely", "draw", "shared all-reduce", "attention"),
)
POOLS = ("float16", "int8", "e4m3", "e5m2")
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user"}

pytestmark = [pytest.mark.proof(minutes=4), pytest.mark.xdist_group("aarch64")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, in the same folder as the library that it calls."""
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            message = f"{program} is not installed (Debian: {package})"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", COMPILER)
        library = build.build(folder / "libsrv_cpu.so", machine="aarch64")
    source, program = Path(__file__).with_name("native_driver.cpp"), folder / "driver"
    # GCC 12 for aarch64 ends with an internal error at -O3 here.
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", f"-I{build.SOURCES}", "-o", str(program)]
    subprocess.run([COMPILER, *options, str(source), str(library)], check=True)
    return program


def ggml_types() -> list[int]:
    """All types of the header, which this machine may have no library for."""
    header = (build.SOURCES / "gguf.h").read_text()
    (types,) = re.findall(r"enum class GgmlType : int32_t \{(.*?)\}", header, re.DOTALL)
    return [int(number) for number in re.findall(r"= (\d+)", types)]


def run(driver: Path, processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [EMULATOR, "-cpu", processor, "-L", SYSTEM, str(driver), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(COMPILING_S)
@every(
    ("processor", "arguments", "isa"),
    [("cortex-a72", [], "generic"), ("max", [], "neon_bf16"), ("max", ["generic"], "generic")],
)
def test_errors_of_aarch64_kernels_are_within_their_bounds(
    driver: Path, processor: str, arguments: list[str], isa: str
) -> None:
    process = run(driver, processor, *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == f"isa {isa}"
    matches = [re.fullmatch(r"(.*?) +(float32|bfloat16) +[0-9.]+", line) for line in lines[1:]]
    checked = Counter(match[1] for match in matches if match)
    names = (
        *KERNELS,
        *(f"attention {pool}" for pool in POOLS),
        *(f"blocks of type {ggml_type}" for ggml_type in ggml_types()),
    )
    assert checked == dict.fromkeys(names, 2)  # in two dtypes each


@pytest.mark.timeout(COMPILING_S)
def test_an_instruction_set_that_the_processor_lacks_is_refused(driver: Path) -> None:
    process = run(driver, "cortex-a72", "neon_bf16")
    assert process.returncode == 1
    assert process.stdout == "neon_bf16 is not available\n"
