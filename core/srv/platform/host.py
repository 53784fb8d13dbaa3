"""What a probe may want to know of the host's Python packages, learned without importing them.

Importing torch takes seconds, and fails where a vendor's wheel is installed without its driver; its build
settings are plain assignments in `torch/version.py`, and versions are package metadata.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path


def versions(*distributions: str) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    from importlib import metadata  # a manifest whose probe is not asked waits for none of it

    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def is_installed(package: str) -> bool:
    """Whether a top-level package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def torch_build(folder: Path | None = None) -> Mapping[str, str | None]:
    """The settings that torch was built with, by the names in `torch/version.py`; empty without torch.

    `folder` is that of the package, for tests; the installed one otherwise.
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
