"""Describe this machine and measure its ceilings: bytes read from memory and products per second."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from srv_cpu.facts import BFLOAT16_UNITS

SOURCE = Path(__file__).with_name("ceilings.c")


@dataclass(frozen=True)
class Ceilings:
    """Measured by `ceilings.c`: GB/s read from memory, and Gop/s of products by dtype, None if there are none."""

    read: float
    f32: float | None
    bf16: float | None
    int8: float | None

    def operations(self, arithmetic: str) -> float | None:
        """Gop/s of "f32", "bf16" or "int8"; bfloat16 can also be multiplied as float32."""
        rates = [self.bf16, self.f32] if arithmetic == "bf16" else [asdict(self)[arithmetic]]
        return max((rate for rate in rates if rate is not None), default=None)


def cores(count: int) -> list[int]:
    """The first `count` processors that this process may use."""
    return sorted(os.sched_getaffinity(0))[:count]


def measure(threads: int) -> Ceilings | None:
    """The ceilings; None without a C compiler, or if the program cannot be built or run."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ceilings")
        build = ["cc", "-O3", "-march=native", "-fopenmp", str(SOURCE), "-o", program]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        try:
            subprocess.run(build, check=True, capture_output=True)
            process = subprocess.run([program], check=True, capture_output=True, text=True, env=environment)
        except (OSError, subprocess.CalledProcessError):
            return None
    return Ceilings(**json.loads(process.stdout))


# The processor features that the page of a benchmark lists.
LISTED_INSTRUCTIONS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16"),
)
# The processor features that name the kind of a machine, best first.
KINDS = {"amx_tile": "amx", "avx512f": "avx512", "avx2": "avx2", "asimd": "neon"}


def machine_kind(instructions: Iterable[str] | None = None) -> str:
    """The kind of a machine, which names its benchmark file; the kind of this machine without `instructions`."""
    flags = set(_instructions() if instructions is None else instructions)
    return next((name for flag, name in KINDS.items() if flag in flags), "plain")


def unquantized_dtype(instructions: Iterable[str] | None = None) -> str:
    """The fastest dtype for unquantized weights: "bfloat16" if the processor has products of it, or else "float32"."""
    flags = set(_instructions() if instructions is None else instructions)
    return "bfloat16" if flags & BFLOAT16_UNITS else "float32"


def describe() -> dict[str, object]:
    """Processor, cores, memory, system."""
    flags = _instructions()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in LISTED_INSTRUCTIONS if name in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _processor() -> str:
    model, family, number = _cpuinfo("model name"), _cpuinfo("cpu family"), _cpuinfo("model")
    return f"{model} (family {family}, model {number})" if model else platform.machine()


def _instructions() -> list[str]:
    return (_cpuinfo("flags") or _cpuinfo("Features")).split()
