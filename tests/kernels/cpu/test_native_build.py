"""How the native library is built: its compiler, and the order in which its objects are linked. Nothing is compiled."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from every import every

from srv_kernels.cpu import build
from srv_kernels.cpu.library import load

MACHINES = ("x86_64", "aarch64", "riscv64")


@every(("compiler", "error"), [("g++-of-long-ago -m64", "cannot be run"), ("g++ 'half", "is not a valid command")])
def test_an_invalid_cxx_is_refused_by_name(
    compiler: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    text = re.escape(f"CXX={compiler} {error}: ") + ".*unset it"
    with pytest.raises(build.CannotBuild, match=text):
        build.build(tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


def test_a_compiler_that_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CannotBuild, match=r"^g\+\+ cannot be run: .*; set CXX to another compiler$"):
        build.build(tmp_path / "x.so")


@every("machine", MACHINES)
def test_an_instruction_set_has_all_flags_of_those_before_it(machine: str) -> None:
    flags = [set(isa) for isa in build.isas(machine).values()]
    assert flags[0] == set()
    assert all(before < after for before, after in itertools.pairwise(flags))


@every("machine", MACHINES)
def test_objects_of_the_smallest_instruction_set_are_linked_first(
    machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The linker keeps the first of several copies of an inline function, which every processor must be able to run."""
    monkeypatch.delenv(build.KEPT_OBJECTS, raising=False)
    commands: list[list[str]] = []

    def record(command: list[str]) -> None:
        commands.append(command)
        Path(command[-1]).touch()

    monkeypatch.setattr(build, "_run", record)
    build.build(tmp_path / "x.so", machine=machine)
    *compiled, linked = commands
    flags = {
        str(Path(command[-1]).with_suffix(".o")): {word for word in command if word.startswith("-m")}
        for command in compiled
    }
    order = [word for word in linked if word in flags]
    assert len(order) == len(compiled) == len(build.ONCE) + len(build.PER_ISA) * len(build.isas(machine))
    assert flags[order[0]] == set()
    assert all(flags[before] <= flags[after] for before, after in itertools.pairwise(order))


def test_kept_objects_are_shared_by_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources, objects, compiled = tmp_path / "native", tmp_path / "objects", set[str]()
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))

    def record(command: list[str]) -> None:
        compiled.add(Path(command[-1]).name)
        Path(command[-1]).touch()

    def built(edited: str | None = None, **options: bool) -> set[str]:
        """The sources that a build compiles, after an edit of a file."""
        compiled.clear()
        if edited is not None:
            (sources / edited).write_text((sources / edited).read_text() + "\n")
        build.build(tmp_path / "x.so", machine="generic", **options)
        return {name.split("-")[0] for name in compiled - {"x.so"}}

    monkeypatch.setattr(build, "_run", record)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv(build.KEPT_OBJECTS, str(objects))
    everything = {*build.ONCE, *build.PER_ISA}
    assert built() == everything
    assert built() == set()
    assert built("linear.cpp") == {"linear"}
    assert built("kernels.h") == everything
    assert built(sanitize=True) == everything
    monkeypatch.setattr(build, "_version", lambda command: "another one")
    assert built() == everything
    shutil.copytree(sources, tmp_path / "copy")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "copy")
    assert built() == set()
    unused = objects / "linear-of-an-old-source.o"
    unused.touch()
    for file in objects.iterdir():
        os.utime(file, (1, 1))
    built()
    assert not unused.exists()
    assert all(file.stat().st_mtime > 1 for file in objects.iterdir())
    monkeypatch.delenv(build.KEPT_OBJECTS)
    assert built() == everything


def test_intel_processors_use_the_kernels_that_widen_bfloat16() -> None:
    """The kernels with bfloat16 dot products can still be selected."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "GenuineIntel" not in cpuinfo or "avx512_bf16" not in cpuinfo:
        pytest.skip("not an Intel processor with bfloat16 dot products")
    if load().library is None:
        pytest.skip(f"no native kernels here: {load().reason}")
    show = "from srv_kernels.cpu.library import load; print(load().isa)"
    for selected, used in (("", "avx512_vnni"), ("avx512_bf16", "avx512_bf16")):
        environment = {**os.environ, "SRV_CPU_ISA": selected}
        process = subprocess.run(
            [sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True
        )
        assert process.stdout.strip() == used
