"""The operators `torch.ops.srv_triton.*` on the simulated device: Triton's interpreter on host views.

    call ─> `like` on the "meta" device ─> poisoned results ─> launched: the interpreter, then the results are filled

A launch is in order with its stream, recorded in a capture, and counted in `accelerator.launches`. A launch of a Triton
kernel on simulated tensors without an operator would copy each argument's whole storage to the host and back.

    SRV_GPU_SIMULATOR_REFERENCE=linear_gguf,rows_gguf    operators that the reference of their contract computes on the
                                                         host, without a launch, for models of ordinary size

They are counted as "linear_gguf (reference)", and a warning names them.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.stream import poison
from srv.testing.simulated_device.tensors import host_view
from srv_gpu_simulator.device import Accelerator
from srv_kernels.contracts import CONTRACTS
from srv_kernels.triton.registration import INTERPRETED, LIBRARY, OPS, TritonOp

REFERENCE_VARIABLE = "SRV_GPU_SIMULATOR_REFERENCE"
_KEY = "PrivateUse1"
_log = logging.getLogger(__name__)


def register_triton_operators(accelerator: Accelerator) -> None:
    """Register every operator that is in `srv_kernels.triton.registration.OPS` now; a later call adds new ones.

    Import the modules with the kernels first. Raises RuntimeError without TRITON_INTERPRET=1, and for an operator that
    returns tensors and has no `like`.
    """
    if not INTERPRETED:
        raise RuntimeError(
            "a simulated GPU runs Triton kernels in Triton's interpreter; set TRITON_INTERPRET=1 before the start of "
            "Python"
        )
    missing = [op for op in OPS.values() if not _is_registered(op)]
    if not missing:
        return
    references = reference_operators()
    kernels = {op.name: TritonKernel(op, accelerator, references.get(op.name)) for op in missing}
    if used := sorted(references.keys() & kernels.keys()):
        _log.warning("%s: no kernel runs for %s, but the reference on the host", REFERENCE_VARIABLE, ", ".join(used))
    library = torch.library.Library(LIBRARY, "FRAGMENT")  # type: ignore[no-untyped-call]
    accelerator.keep_alive(library)
    for name, kernel in kernels.items():
        library.impl(name, kernel, _KEY)  # type: ignore[no-untyped-call]


def reference_operators(environ: Mapping[str, str] = os.environ) -> dict[str, Callable[..., Any]]:
    """The references that replace kernels, by operator, as SRV_GPU_SIMULATOR_REFERENCE says.

    Raises ValueError for an operator whose contract has no reference.
    """
    names = [name.strip() for name in environ.get(REFERENCE_VARIABLE, "").split(",") if name.strip()]
    references = {name: contract.reference for name, contract in CONTRACTS.items() if contract.reference}
    if unknown := [name for name in names if name not in references]:
        raise ValueError(
            f"{REFERENCE_VARIABLE} names {', '.join(unknown)}; there are references for {', '.join(references)}"
        )
    return {name: pkgutil.resolve_name(references[name]) for name in names}


def _is_registered(op: TritonOp) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{LIBRARY}::{op.name}", _KEY))


class TritonKernel:
    """The function that PyTorch calls for an operator on the simulated device.

    reference: what computes its results instead of the kernel.
    """

    def __init__(self, op: TritonOp, accelerator: Accelerator, reference: Callable[..., Any] | None = None) -> None:
        self._op = op
        self._accelerator = accelerator
        self._launch = op.launch if reference is None else reference
        self._counted = op.name if reference is None else f"{op.name} (reference)"
        schema = torch._C.parse_schema(f"{LIBRARY}::{op.schema}")
        self._names = [argument.name for argument in schema.arguments]
        written = {
            alias: argument.name
            for argument in schema.arguments
            if argument.alias_info is not None
            for alias in argument.alias_info.before_set
        }
        # For each result: the argument that it is, or None for new memory.
        self._returned = [
            None if result.alias_info is None else next(written[alias] for alias in result.alias_info.before_set)
            for result in schema.returns
        ]
        if None in self._returned and op.like is None:
            raise RuntimeError(f"{LIBRARY}::{op.name} returns new tensors, but was registered without `like`")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._accelerator.check_current_device(f"{LIBRARY}::{self._op.name}")
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        fresh = self._new_results(args, kwargs) if None in self._returned else []
        self._accelerator.launch(self._counted, self._run, fresh, args, **kwargs)
        new = iter(fresh)
        results = [next(new) if name is None else arguments[name] for name in self._returned]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _new_results(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Poisoned device tensors for the results that are new."""
        assert self._op.like is not None
        results = self._op.like(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})
        shapes = results if isinstance(results, (list, tuple)) else [results]
        fresh = [
            self._accelerator.factory.empty_like(like)
            for like, name in zip(shapes, self._returned, strict=True)
            if name is None
        ]
        for tensor in fresh:
            poison(host_view(tensor))
        return fresh

    def _run(self, fresh: Sequence[Tensor], args: Sequence[Any], **kwargs: Any) -> None:
        """Launch on host views, and fill the new results. RuntimeError if they are not like `like` says."""
        result = self._launch(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        new = [value for value, name in zip(results, self._returned, strict=False) if name is None]
        for target, value in zip(fresh, new, strict=True):
            if (target.shape, target.dtype) != (value.shape, value.dtype):
                raise RuntimeError(
                    f"{LIBRARY}::{self._op.name}: `like` says {target.dtype} of shape {tuple(target.shape)}, but the "
                    f"launch returned {value.dtype} of shape {tuple(value.shape)}"
                )
            target.copy_(value)


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return [_as_meta(one) for one in value] if isinstance(value, (list, tuple)) else value
