"""Build hook of the wheel: compiles the native CPU kernels if there is a compiler, and displays a warning otherwise.

The library has a C interface for `ctypes`, so that one wheel serves all Python versions on a platform. Without the
library the wheel is pure Python, and the CPU platform uses torch only.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = _builder(Path(self.root))
        try:
            library = builder.build()
        except builder.CannotBuild as error:
            self.app.display_warning(f"srv-kernels is built without its native CPU kernels: {error}")
            return
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["artifacts"].append(str(library.relative_to(self.root)))


def _builder(root: Path) -> ModuleType:
    """srv_kernels.cpu.build, loaded by its path, because importing the package needs torch."""
    spec = importlib.util.spec_from_file_location("build_native", root / "srv_kernels" / "cpu" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
