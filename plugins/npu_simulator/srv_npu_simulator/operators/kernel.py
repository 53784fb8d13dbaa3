"""One of torch_npu's operators at work: placement, reference on host views, results onto the device, recording."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.tensors import host_view, is_device_tensor
from srv_npu_simulator.device.accelerator import Accelerator
from srv_npu_simulator.device.graph import Task
from srv_npu_simulator.operators.checks import check_placement
from srv_npu_simulator.operators.schemas import LIBRARY, OPERATORS, Operator


class OperatorKernel:
    """What PyTorch calls for `operator`, wherever its tensors are."""

    def __init__(self, operator: Operator, schema: torch.FunctionSchema, accelerator: Accelerator) -> None:
        self._operator = operator
        self._factory = accelerator.factory
        self._recorder = accelerator.recorder
        self._names = [argument.name for argument in schema.arguments]
        written = {
            argument.alias_info.before_set.pop(): argument.name
            for argument in schema.arguments
            if argument.alias_info is not None
        }
        # For each result: the argument that it is, or None for new memory.
        self._returned = [
            written[result.alias_info.before_set.pop()] if result.alias_info is not None else None
            for result in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_placement(self._operator.name, self._names, args, kwargs)
        host_args = tuple(_lowered(value) for value in args)
        host_kwargs = {name: _lowered(value) for name, value in kwargs.items()}
        result = self._operator.reference(*host_args, **host_kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        results = result if isinstance(result, tuple) else (result,)
        raised = [
            given[name] if name is not None else self._factory.on_device(value)
            for name, value in zip(self._returned, results, strict=True)
        ]
        if (recording := self._recorder.active) is not None:
            targets = tuple(
                host_view(value) if name is None else None for name, value in zip(self._returned, raised, strict=True)
            )
            task = Task(
                self._operator.name,
                self._operator.reference,
                host_args,
                host_kwargs,
                targets,
                frozenset(self._operator.updatable),
            )
            recording.add(task, list(given.values()))
        return raised[0] if len(raised) == 1 else tuple(raised)


def _lowered(value: Any) -> Any:
    if is_device_tensor(value):
        return host_view(value)
    # A graph keeps the host values of the capture, whatever the program does to its list.
    return list(value) if isinstance(value, (list, tuple)) and not isinstance(value, Tensor) else value


def register_operators(accelerator: Accelerator) -> None:
    """Declare every operator to PyTorch, for tensors of the host as well: there they are refused by name."""
    library = torch.library.Library(LIBRARY, "FRAGMENT")  # type: ignore[no-untyped-call]
    accelerator.keep(library)
    for operator in OPERATORS:
        library.define(operator.schema)  # type: ignore[no-untyped-call]
        schema = torch._C.parse_schema(f"{LIBRARY}::{operator.schema}")
        kernel = OperatorKernel(operator, schema, accelerator)
        for key in ("PrivateUse1", "CPU"):
            library.impl(operator.name, kernel, key)  # type: ignore[no-untyped-call]
