"""Compiles the native library: run when the wheel is built, or by hand after an edit.

    python -m srv_kernels.cpu.build [--sanitize]

Needs a C++20 compiler (`CXX`, else g++ or clang++) and nothing else: neither torch nor Python's headers. Each kernel
file is compiled once for each instruction set; the library picks one when it is loaded. Must import nothing but the
standard library, since a build has nothing else.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = SOURCES / "libsrv_cpu.so"
PER_ISA = ("pointwise", "linear", "integers", "blocks", "attention", "sampling", "table")
ONCE = ("pool", "stored", "library")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
_ISAS = {
    "x86_64": {
        "generic": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": _AVX512,
        "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    },
    "aarch64": {  # NEON is part of the architecture
        "generic": (),
        "neon_bf16": ("-march=armv8.2-a+i8mm+bf16",),
    },
}
MACHINE = platform.machine().replace("arm64", "aarch64")
# With type-based aliasing GCC 12 loses what was stored in the halves of wide vectors (seen on aarch64).
_FLAGS = (
    *("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1")


class CannotBuild(Exception):
    """There is no compiler, or it refused; the text says which and what to do."""


def compiler() -> list[str]:
    """The C++ compiler's command. Raises CannotBuild if there is none."""
    if said := os.environ.get("CXX"):
        return shlex.split(said)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler found (CXX, g++, clang++); install g++ to get the native CPU kernels")


def isas(machine: str = MACHINE) -> dict[str, tuple[str, ...]]:
    """The instruction sets of "x86_64" or "aarch64", with the compiler's flags for each; of any other, "generic"."""
    return _ISAS.get(machine, {"generic": ()})


def build(library: Path = LIBRARY, sanitize: bool = False, machine: str = MACHINE) -> Path:
    """Compile and link everything into `library`, replacing it in one move. Raises CannotBuild.

    machine: what the compiler compiles for, "x86_64" or "aarch64"; for any other, the generic kernels alone are built.
    """
    command = [*compiler(), *_FLAGS, *(_SANITIZE if sanitize else ())]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        jobs = [(source, work / f"{source}.o", ()) for source in ONCE]
        jobs += [
            (source, work / f"{source}-{isa}.o", (*flags, f"-DSRV_ISA={isa}"))
            for isa, flags in isas(machine).items()
            for source in PER_ISA
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda job: _run([*command, *job[2], "-c", f"{SOURCES / job[0]}.cpp", "-o", str(job[1])]), jobs
                )
            )
        linked = work / library.name
        _run([*command, "-shared", "-pthread", *(str(job[1]) for job in jobs), "-o", str(linked)])
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, fresh)
        fresh.replace(library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="where the library goes")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    asked = parser.parse_args()
    try:
        print(build(asked.out, asked.sanitize))
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
