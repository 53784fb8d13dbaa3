"""Which operators and kernels are launched, by name, for tests: a platform may otherwise pass them with PyTorch's.

    SRV_TRITON_LAUNCHES=FILE    each process appends a line to FILE when it launches one for the first time:
                                "operator rms_norm", "kernel _rms_norm"

Without the variable, when the process starts, operators are registered as they are, and nothing is recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "SRV_TRITON_LAUNCHES"
_PACKAGE = __name__.rpartition(".")[0]


def recorded(operator: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """The function that launches an operator; with the variable set, one that also records the operator and the
    kernels that its module knows, and those of the modules from which it has functions."""
    file = os.environ.get(VARIABLE)
    if not file:
        return launch
    for kernel in _kernels(launch.__globals__):
        kernel.add_pre_run_hook(_recorder(file, kernel.__name__))

    @wraps(launch)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = launch(*args, **kwargs)
        _append(file, f"operator {operator}")
        return result

    return run


def launched(file: Path) -> tuple[set[str], set[str]]:
    """The operators and the kernels in a file that processes with the variable have written."""
    lines = [line.split(" ") for line in file.read_text(encoding="utf-8").splitlines()]
    operators, kernels = (
        {name for kind, name in lines if kind == listed_kind} for listed_kind in ("operator", "kernel")
    )
    return operators, kernels


def _kernels(names: dict[str, Any]) -> Iterator[Any]:
    """The functions for Triton in a module, and in the modules of this package from which it imports anything."""
    for value in names.values():
        if hasattr(value, "add_pre_run_hook"):
            yield value
        elif (module := _module(value)) is not None:
            yield from (one for one in vars(module).values() if hasattr(one, "add_pre_run_hook"))


def _module(value: Any) -> ModuleType | None:
    """The module of this package that a name stands for, or from which it comes."""
    if isinstance(value, ModuleType):
        return value if value.__name__.startswith(f"{_PACKAGE}.") else None
    name = getattr(value, "__module__", None)
    return sys.modules[name] if isinstance(name, str) and name.startswith(f"{_PACKAGE}.") else None


def _recorder(file: str, kernel: str) -> Callable[..., None]:
    return lambda *args, **kwargs: _append(file, f"kernel {kernel}")


@cache
def _append(file: str, line: str) -> None:
    """At once, because the process may be killed; whole, because others write to the file too."""
    with open(file, "a", encoding="utf-8") as out:
        out.write(f"{line}\n")
