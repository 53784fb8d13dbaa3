"""The kernel of an operator: check placement, run the reference on host views, move results to the device, record."""

from __future__ import annotations

from typing import Any

import torch

from srv.testing.simulated_device.graphs import Call
from srv.testing.simulated_device.tensors import host_view, is_device_tensor
from srv_npu_simulator.device.accelerator import Accelerator
from srv_npu_simulator.device.graph import Task
from srv_npu_simulator.operators.checks import check_placement
from srv_npu_simulator.operators.schemas import LIBRARY, OPERATORS, Operator


class OperatorKernel:
    """The function that PyTorch calls for `operator`, on any device."""

    def __init__(self, operator: Operator, schema: torch.FunctionSchema, accelerator: Accelerator) -> None:
        self._operator = operator
        self._factory = accelerator.factory
        self._recorder = accelerator.recorder
        self._deferral = accelerator.deferral
        self._names = [argument.name for argument in schema.arguments]
        written = {
            argument.alias_info.before_set.pop(): argument.name
            for argument in schema.arguments
            if argument.alias_info is not None
        }
        # For each result: the argument that it aliases, or None for new memory.
        self._returned = [
            written[result.alias_info.before_set.pop()] if result.alias_info is not None else None
            for result in schema.returns
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_placement(self._operator.name, self._names, args, kwargs)
        host_args = tuple(_to_host(value) for value in args)
        host_kwargs = {name: _to_host(value) for name, value in kwargs.items()}
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if self._deferral.enabled and self._recorder.active is None:
            enqueued = self._enqueue(host_args, host_kwargs, arguments)
            if enqueued is not None:
                return enqueued[0] if isinstance(enqueued, tuple) and len(enqueued) == 1 else enqueued
        result = self._operator.reference(*host_args, **host_kwargs)
        results = result if isinstance(result, (list, tuple)) else (result,)
        returned = [None] * len(results) if isinstance(result, list) else self._returned
        outputs = [
            arguments[name] if name is not None else self._factory.on_device(value)
            for name, value in zip(returned, results, strict=True)
        ]
        if (recording := self._recorder.active) is not None:
            targets = tuple(
                host_view(value) if name is None else None for name, value in zip(returned, outputs, strict=True)
            )
            task = Task(
                self._operator.name,
                self._operator.reference,
                host_args,
                host_kwargs,
                targets,
                frozenset(self._operator.updatable),
            )
            recording.add(task, list(arguments.values()))
        return outputs if isinstance(result, list) else outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _enqueue(
        self, host_args: tuple[Any, ...], host_kwargs: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Any, ...] | list[Any] | None:
        """Enqueue the operator and return its results, or wait for the stream and return None."""
        operator = self._operator
        if all(name is not None for name in self._returned):
            self._deferral.enqueue(lambda: operator.reference(*host_args, **host_kwargs))
            return tuple(arguments[name] for name in self._returned if name is not None)
        results = self._deferral.results_of(operator.shapes or operator.reference, host_args, host_kwargs)
        if results is None:
            self._deferral.wait()
            return None
        outputs = results if isinstance(results, (list, tuple)) else (results,)
        targets = tuple(host_view(output) for output in outputs)
        self._deferral.enqueue(Call(operator.name, operator.reference, host_args, host_kwargs, targets).run)
        return outputs


def _to_host(value: Any) -> Any:
    if is_device_tensor(value):
        return host_view(value)
    # Lists are copied, because a graph keeps the host values of the capture.
    return [_to_host(element) for element in value] if isinstance(value, (list, tuple)) else value


def register_operators(accelerator: Accelerator) -> None:
    """Register every operator with PyTorch, also for host tensors, which are refused by name."""
    library = torch.library.Library(LIBRARY, "FRAGMENT")  # type: ignore[no-untyped-call]
    accelerator.keep_alive(library)
    for operator in OPERATORS:
        library.define(operator.schema)  # type: ignore[no-untyped-call]
        schema = torch._C.parse_schema(f"{LIBRARY}::{operator.schema}")
        kernel = OperatorKernel(operator, schema, accelerator)
        for key in ("PrivateUse1", "CPU"):
            library.impl(operator.name, kernel, key)  # type: ignore[no-untyped-call]
