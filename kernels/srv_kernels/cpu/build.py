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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = SOURCES / "libsrv_cpu.so"
PER_ISA = ("pointwise", "linear", "int8_linear", "gguf_linear", "attention", "sampling", "table")
ONCE = ("thread_pool", "gguf_dequant", "library")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_ISAS = {  # each with all flags of those before it: see `_objects`
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
# With type-based aliasing GCC 12 loses what was stored in the halves of wide vectors (seen on aarch64).
_FLAGS = (
    *("-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1")
_ANOTHER = "name a C++20 compiler that is there, or unset CXX to take g++ or clang++"


class CannotBuild(Exception):
    """There is no compiler, or it refused; the text says which and what to do."""


def compiler() -> list[str]:
    """The C++ compiler's command. Raises CannotBuild if there is none."""
    if said := os.environ.get("CXX", "").strip():
        try:
            return shlex.split(said)
        except ValueError as error:
            raise CannotBuild(f"CXX={said}, of the environment, is no command: {error}; {_ANOTHER}") from error
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler found (CXX, g++, clang++); install g++ to get the native CPU kernels")


def isas(machine: str = MACHINE) -> dict[str, tuple[str, ...]]:
    """The instruction sets of "x86_64" or "aarch64", with the compiler's flags for each; of any other, "generic"."""
    return _ISAS.get(machine, {"generic": ()})


def build(library: Path = LIBRARY, sanitize: bool = False, machine: str = MACHINE, objects: Path | None = None) -> Path:
    """Compile and link everything into `library`, replacing it in one move. Raises CannotBuild.

    machine: what the compiler compiles for, "x86_64" or "aarch64"; for any other, the generic kernels alone are built.
    objects: a folder that keeps the object files, of one compiler and one machine. Those that are newer than their
    sources are not compiled again.
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
        fresh = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, fresh)
        fresh.replace(library)
    return library


def _is_current(compiled: Path, source: str) -> bool:
    """Whether an object file is newer than its source, all headers, and this file, which has the flags."""
    sources = (SOURCES / f"{source}.cpp", *SOURCES.glob("*.h"), Path(__file__))
    return compiled.exists() and compiled.stat().st_mtime_ns > max(each.stat().st_mtime_ns for each in sources)


def _objects(machine: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The object files in the order they are linked in: the source of each, and the flags that it adds.

    The plainest come first. Inline functions outside of `srv::SRV_ISA` (members of std::vector, `from_half`, ...) may
    be emitted in several objects, of which the linker keeps the first for all of them. Were it one of a richer
    instruction set, a processor without it would meet an illegal instruction in the plain kernels.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {f"{source}.o": (source, ()) for source in ONCE}
    for isa, flags in sorted(isas(machine).items(), key=lambda each: len(each[1])):
        found |= {f"{source}-{isa}.o": (source, (*flags, f"-DSRV_ISA={isa}")) for source in PER_ISA}
    return found


def _jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        asked = os.environ.get("CXX", "").strip()
        said, cure = (f"CXX={asked}, of the environment,", _ANOTHER) if asked else (command[0], "name another in CXX")
        raise CannotBuild(f"{said} cannot be run: {error}; {cure}") from error
    if done.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels.")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="where the library goes")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    asked = parser.parse_args()
    try:
        begun = time.perf_counter()
        library = build(asked.out, asked.sanitize)
        print(f"{library}: built in {time.perf_counter() - begun:.0f} s")
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
