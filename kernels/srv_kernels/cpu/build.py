"""Compiles the native library, when the wheel is built or by hand after an edit.

    python -m srv_kernels.cpu.build [--sanitize]

Needs only a C++20 compiler (`CXX`, otherwise g++ or clang++), not torch or Python's headers. Each kernel file is
compiled once per instruction set; the library selects one when it is loaded. Imports only the standard library, since
nothing else is installed during a build.

NATIVE_OBJECTS: a folder that keeps object files by the content of all that they are made of, so that builds in
several places (a checkout, a wheel, a copy of the tree with one edit) share them. Several processes may use it at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = SOURCES / "libsrv_cpu.so"
KEPT_OBJECTS = "NATIVE_OBJECTS"
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

    machine: the target, "x86_64" or "aarch64"; for any other, only the generic kernels are built. objects: the folder
    of kept object files, otherwise that of NATIVE_OBJECTS; without either, none are kept.
    """
    command = [*compiler(), *_FLAGS, *(_SANITIZE if sanitize else ())]
    objects_folder = objects or (Path(path) if (path := os.environ.get(KEPT_OBJECTS)) else None)
    with tempfile.TemporaryDirectory() as folder:
        work = objects_folder or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        compiled = [_Object(work, command, flags, source) for source, flags in _objects(machine)]
        with ThreadPoolExecutor(_jobs()) as pool:
            list(pool.map(_Object.compile, compiled))
        linked = Path(folder) / library.name
        _run(
            [
                *command,
                "-shared",
                "-pthread",
                *(str(compiled_object.path) for compiled_object in compiled),
                "-o",
                str(linked),
            ]
        )
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_name(f".{library.name}.{os.getpid()}")
        shutil.copyfile(linked, temporary)
        temporary.replace(library)
        if objects_folder:
            _remove_unused(objects_folder)
    return library


class _Object:
    """An object file. Its name has a digest of the compiler, its version, its flags, the source and all headers."""

    def __init__(self, folder: Path, command: list[str], flags: tuple[str, ...], source: str) -> None:
        self._command = [*command, *flags, "-c", str(SOURCES / f"{source}.cpp")]
        parts = [_version(tuple(compiler())), *command, *flags]
        files = (SOURCES / f"{source}.cpp", *sorted(SOURCES.glob("*.h")))
        content = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        digest = hashlib.sha256("\0".join([*parts, *content]).encode()).hexdigest()
        self.path = folder / f"{source}-{digest[:24]}.o"

    def compile(self) -> None:
        if self.path.exists():
            self.path.touch()
            return
        temporary = self.path.with_suffix(f".{os.getpid()}")
        _run([*self._command, "-o", str(temporary)])
        temporary.replace(self.path)


def _remove_unused(folder: Path) -> None:
    """Remove the objects that no build has used for a month."""
    oldest = time.time() - 30 * 24 * 3600
    for file in folder.iterdir():
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


@cache
def _version(command: tuple[str, ...]) -> str:
    """What the compiler says of its version; empty if it cannot be run, which compiling reports."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def _objects(machine: str) -> list[tuple[str, tuple[str, ...]]]:
    """The source and the extra flags of each object file, in link order.

    The smallest instruction set comes first. Inline functions outside `srv::SRV_ISA` (members of std::vector,
    `from_half`, ...) may be emitted in several objects, and the linker keeps the first copy. If that used a larger
    instruction set, generic kernels would execute illegal instructions on processors without it.
    """
    sources: list[tuple[str, tuple[str, ...]]] = [(source, ()) for source in ONCE]
    for isa, flags in sorted(isas(machine).items(), key=lambda isa: len(isa[1])):
        sources += [(source, (*flags, f"-DSRV_ISA={isa}")) for source in PER_ISA]
    return sources


def _jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        chosen = os.environ.get("CXX", "").strip()
        name, remedy = (f"CXX={chosen}", _CXX_REMEDY) if chosen else (command[0], "set CXX to another compiler")
        raise CannotBuild(f"{name} cannot be run: {error}; {remedy}") from error
    if process.returncode != 0:
        raise CannotBuild(f"{shlex.join(command)} failed with status {process.returncode}:\n{process.stderr[-4000:]}")


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
