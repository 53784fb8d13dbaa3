"""Triton launches as operators of PyTorch: `torch.ops.srv_triton.<name>`.

    @triton_op("silu_and_mul(Tensor x) -> Tensor", like=...)
    def silu_and_mul(x): ...  allocate the result, launch the kernel

An operator is what a captured graph or a simulated device records, and what knows the shapes of its results without
running (`like`, on tensors of the "meta" device). Host tensors are accepted in Triton's interpreter only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from srv_kernels.triton.launches import recorded

LIBRARY = "srv_triton"
# Dispatch keys of the devices that Triton compiles for; ROCm's tensors have CUDA's key. A simulated device adds its
# own.
_KEYS = ("CUDA", "XPU", "CPU")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_library = torch.library.Library(LIBRARY, "DEF")
Launch = TypeVar("Launch", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class TritonOp:
    """An operator: its schema, the function that launches it, and the shapes of its results."""

    name: str
    schema: str
    launch: Callable[..., Any]
    like: Callable[..., Any] | None


OPS: dict[str, TritonOp] = {}


def triton_op(schema: str, like: Callable[..., Any] | None = None) -> Callable[[Launch], Launch]:
    """Register the decorated function, which launches a kernel, as an operator; the function stays callable.

    schema: as `torch.library` takes it. like: returns tensors like the results, given the same arguments on the "meta"
    device; not needed for an operator that writes its arguments and returns nothing.
    """
    name = schema.partition("(")[0]

    def register(launch: Launch) -> Launch:
        if name in OPS:
            raise ValueError(f"two Triton operators are called {name}")
        run = recorded(name, launch)
        _library.define(schema)
        for key in _KEYS:
            _library.impl(name, _on_host(name, run) if key == "CPU" else run, key)
        _library.impl(name, like if like is not None else _nothing, "Meta")
        OPS[name] = TritonOp(name, schema, run, like)
        return launch

    return register


def _on_host(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not INTERPRETED:
            raise RuntimeError(
                f"{LIBRARY}::{name} was given tensors in host memory, for which Triton compiles no code; set "
                "TRITON_INTERPRET=1 before the start of Python to interpret it"
            )
        return launch(*args, **kwargs)

    return run


def _nothing(*args: Any, **kwargs: Any) -> None:
    """The result of an operator that only writes its arguments."""
