"""Installs a pack on a machine without a network, into an environment of its own. Standard library and pip only.

    python3 unpack.py build/gpu-pack build/gpu-env        prints the environment's interpreter

The environment sees the packages of the interpreter that runs this (torch, Triton, transformers), and takes the code of
srv from the checkout. Nothing of the machine's own environment is changed. A checkout without its repository gets the
one in the pack, so that evidence can name its commit.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT = "git.tar.gz"


def sources(root: Path) -> list[str]:
    """The folders of the checkout from which srv's packages are imported."""
    return [
        str(root / "core"),
        str(root / "kernels"),
        str(root / "support_matrix"),
        *map(str, root.glob("platforms/*")),
    ]


def gather(pack: Path, folder: Path) -> list[Path]:
    """All wheels of a pack; those in pieces are joined in `folder`. A wheel with missing pieces is left out."""
    wheels = sorted(pack.glob("*/*.whl"))
    for name in sorted({piece.name.removesuffix(".0") for piece in pack.glob("*/*.whl.0")}):
        pieces = sorted(pack.glob(f"*/{name}.*"), key=lambda piece: int(piece.suffix[1:]))
        joined = folder / name
        with joined.open("wb") as wheel:
            for piece in pieces:
                wheel.write(piece.read_bytes())
        if [int(piece.suffix[1:]) for piece in pieces] == list(range(len(pieces))) and zipfile.is_zipfile(joined):
            wheels.append(joined)
        else:
            print(f"{name} is left out: a folder of the pack is missing", file=sys.stderr)
    return wheels


def create(environment: Path, wheels: Sequence[Path], root: Path = ROOT) -> Path:
    """Create the environment and install the wheels. Returns its interpreter."""
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, system_site_packages=True, with_pip=False, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(packages), *map(str, wheels)], check=True, stdout=sys.stderr)
    # If this interpreter is that of an environment too, the new one does not see its packages by itself.
    parents = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [
        f"import sys; sys.path[:0] = {sources(root)!r}",
        *(f"import site; site.addsitedir({path!r})" for path in parents),
    ]
    (packages / "gpu-proof.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for script in (packages / "bin").glob("*"):  # ninja; --target keeps scripts here
        shutil.copy(script, environment / "bin" / script.name)
    return environment / "bin" / "python"


def add_repository(pack: Path, root: Path = ROOT) -> None:
    """Unpack the repository of the pack if the checkout has none. The files of the checkout are not changed."""
    archive = next(pack.glob(f"*/{GIT}"), None)
    if archive is None or (root / ".git").exists() or shutil.which("git") is None:
        return
    with tarfile.open(archive) as repository:
        repository.extractall(root, filter="data")
    for command in (["config", "core.bare", "false"], ["reset", "--quiet", "--mixed"]):
        subprocess.run(["git", *command], cwd=root, check=True, stdout=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    pack, environment = (Path(argument).resolve() for argument in arguments)
    add_repository(pack)
    with tempfile.TemporaryDirectory() as scratch:
        print(create(environment, gather(pack, Path(scratch))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
