"""Compiles the native library, when the wheel is built or by hand after an edit.

    python -m srv_kernels.cpu.build [--sanitize]

Needs only a C++20 compiler (`CXX`, otherwise g++ or clang++), not torch or Python's headers. Each kernel file is
compiled once per instruction set; the library selects one when it is loaded. Imports only the standard library, since
nothing else is installed during a build.
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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = SOURCES / "libsrv_cpu.so"
PER_ISA = (
    *("pointwise", "linear", "int8_linear", "gguf_linear", "expert_rows", "attention"),
    *("latent_attention", "latent_prefill", "sampling", "table"),
)
ONCE = ("thread_pool", "gguf_dequant", "shared_reduce", "experts", "library")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_ISAS = {  # each includes all flags of the ones before it: see `_objects`
    "x86_64": {
        "generic": (),
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    },
    "aarch64": {  # NEON is part of the architecture
        "generic": (),
        "neon_bf16": ("-march=armv8.2-a+i8mm+bf16",),
    },
}
MACHINE = platform.machine().replace("arm64", "aarch64")
# With strict aliasing GCC 12 drops stores to the halves of wide vectors (seen on aarch64).
_FLAGS = (
    *("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1")
_CXX_REMEDY = "set it to an installed C++20 compiler, or unset it to use g++ or clang++"


class CannotBuild(Exception):
    """There is no compiler, or it failed; the message says what to do."""


def compiler() -> list[str]:
    """The C++ compiler's command. Raises CannotBuild if there is none."""
    if command := os.environ.get("CXX", "").strip():
        try:
            return shlex.split(command)
        except ValueError as error:
            raise CannotBuild(f"CXX={command} is not a valid command: {error}; {_CXX_REMEDY}") from error
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler found (CXX, g++, clang++); install g++ to get the native CPU kernels")


def isas(machine: str = MACHINE) -> dict[str, tuple[str, ...]]:
    """Instruction sets and their compiler flags, for "x86_64" or "aarch64"; only "generic" for other machines."""
    return _ISAS.get(machine, {"generic": ()})


def build(library: Path = LIBRARY, sanitize: bool = False, machine: str = MACHINE, objects: Path | None = None) -> Path:
    """Compile and link everything into `library`, replacing it atomically. Raises CannotBuild.

    machine: the target, "x86_64" or "aarch64"; for any other, only the generic kernels are built. objects: a folder for
    the object files of one compiler and one machine, so that only changed sources are compiled again.
    """
    command = [*compiler(), *_FLAGS, *(_SANITIZE if sanitize else ())]
    with tempfile.TemporaryDirectory() as folder:
        work = objects or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        parts = _objects(machine)
        compiling = [
            [*command, *flags, "-c", f"{SOURCES / source}.cpp", "-o", str(work / name)]
            for name, (source, flags) in parts.items()
            if not _is_current(work / name, source)
        ]
        with ThreadPoolExecutor(_jobs()) as pool:
            list(pool.map(_run, compiling))
        linked = Path(folder) / library.name
        _run([*command, "-shared", "-pthread", *(str(work / name) for name in parts), "-o", str(linked)])
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, temporary)
        temporary.replace(library)
    return library


def _is_current(compiled: Path, source: str) -> bool:
    """Whether an object file is newer than its source, all headers, and this file, which defines the flags."""
    sources = (SOURCES / f"{source}.cpp", *SOURCES.glob("*.h"), Path(__file__))
    return compiled.exists() and compiled.stat().st_mtime_ns > max(file.stat().st_mtime_ns for file in sources)


def _objects(machine: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The object files in link order, with the source and the extra flags of each.

    The smallest instruction set comes first. Inline functions outside `srv::SRV_ISA` (members of std::vector,
    `from_half`, ...) may be emitted in several objects, and the linker keeps the first copy. If that used a larger
    instruction set, generic kernels would execute illegal instructions on processors without it.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {f"{source}.o": (source, ()) for source in ONCE}
    for isa, flags in sorted(isas(machine).items(), key=lambda isa: len(isa[1])):
        found |= {f"{source}-{isa}.o": (source, (*flags, f"-DSRV_ISA={isa}")) for source in PER_ISA}
    return found


def _jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        chosen = os.environ.get("CXX", "").strip()
        name, remedy = (f"CXX={chosen}", _CXX_REMEDY) if chosen else (command[0], "set CXX to another compiler")
        raise CannotBuild(f"{name} cannot be run: {error}; {remedy}") from error
    if done.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="path of the library")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    args = parser.parse_args()
    try:
        start = time.perf_counter()
        library = build(args.out, args.sanitize)
        print(f"{library}: built in {time.perf_counter() - start:.0f} s")
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
