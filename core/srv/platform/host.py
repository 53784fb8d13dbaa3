"""Facts about installed Python packages, for probes, without importing the packages.

Importing torch takes seconds, and fails where a vendor's wheel is installed without its driver. Its build
settings are plain assignments in `torch/version.py`, and versions are package metadata.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path


def versions(*distributions: str) -> dict[str, str]:
    """The versions of the given distributions; those that are not installed are left out."""
    from importlib import metadata  # imported only when a probe runs

    versions_: dict[str, str] = {}
    for name in distributions:
        try:
            versions_[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_


def is_installed(package: str) -> bool:
    """Whether a top-level package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


def minor(version: str) -> str:
    """The first two numbers of a version, by which extensions follow torch: "2.8" of "2.8.10+xpu"."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def torch_build(folder: Path | None = None) -> Mapping[str, str | None]:
    """The settings that torch was built with, by the names in `torch/version.py`; empty without torch.

    `folder`: the package's folder, for tests; default: the installed package's.
    """
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent
    try:
        tree = ast.parse((folder / "version.py").read_text())
    except (OSError, SyntaxError):
        return {}
    return dict(_constants(tree))


def _constants(tree: ast.Module) -> list[tuple[str, str | None]]:
    constants: list[tuple[str, str | None]] = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            constants.extend((target.id, value.value) for target in targets if isinstance(target, ast.Name))
    return constants
