"""Kernels: PyTorch's operators on the device, run by the host's kernels on device memory.

    call ─> operands on one device? ─> host views ─> host kernel ─> results to the device ─> recorded in the graph

Every "aten" operator with a host kernel is registered. Without that, PyTorch would decompose many into several calls.
Custom operators of other libraries raise NotImplementedError, as on a new device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.deferral import Deferral
from srv.testing.simulated_device.graphs import Call, Graph, Recorder, depends_on_data, random_source
from srv.testing.simulated_device.placement import HOST, INDEX_ARGUMENTS, is_host_scalar, operator_name
from srv.testing.simulated_device.refusals import Refusals
from srv.testing.simulated_device.tensors import HOST_KEY, HOST_KEYS, ForeignTensor, TensorFactory, host_view

# Operators that only create a view or change a tensor's metadata: the host's kernel does not access data.
VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)

# Operators that may change the shape of the argument that they write.
RESIZING = ("resize_", "resize_as_", "squeeze_", "unsqueeze_", "transpose_", "t_", "as_strided_")

# PyTorch decomposes these, but they are common enough to run in one call.
ALSO_DIRECT = ("clone", "embedding", "stack", "index_put_", "index_put", "repeat", "_safe_softmax")

# Operators that PyTorch calls for an unknown device, and the host's operators that replace them.
SUBSTITUTES = {
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}


def operator_named(name: str) -> torch._ops.OpOverload:
    """The operator of that name, with or without overload ("add.Tensor", "clone"); of aten by default."""
    library, _, short = name.rpartition("::")
    base, _, overload = short.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), base), overload or "default")  # type: ignore[no-any-return]


def host_kernel_names() -> list[str]:
    """Names of the aten operators that have a host kernel, without the library's prefix."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name.removeprefix("aten::") for name in names if has_kernel(name, HOST_KEY)]


def view_kernel(name: str) -> Callable[..., Tensor]:
    """A kernel for one of `VIEWS`."""
    handle = operator_named(name)._handle

    def run(*args: object, **kwargs: object) -> Tensor:
        return handle.redispatch_boxed(HOST_KEYS, *args, **kwargs)  # type: ignore[no-any-return]

    return run


class Kernel:
    """One operator on the device. It reads its schema at the first call, because most are never called."""

    __slots__ = (
        "_deferral",
        "_device_only",
        "_factory",
        "_generator",
        "_name",
        "_no_scalars",
        "_operator",
        "_positions",
        "_random",
        "_recorder",
        "_refusals",
        "_returned",
        "_written",
    )

    def __init__(
        self,
        name: str,
        factory: TensorFactory,
        generator: torch.Generator,
        recorder: Recorder,
        refusals: Refusals,
        deferral: Deferral,
    ) -> None:
        self._name = name
        self._deferral = deferral
        self._factory = factory
        self._generator = generator
        self._recorder = recorder
        self._refusals = refusals
        self._operator: torch._ops.OpOverload | None = None
        # From the schema: written arguments as (position, name); positions that do not accept a host scalar; for
        # each result, the index in `_written` of the argument that it is, or None.
        self._written: tuple[tuple[int, str], ...] = ()
        self._device_only: frozenset[int] = frozenset()
        self._positions: dict[str, int] = {}
        self._returned: tuple[int | None, ...] = ()
        self._random = ""
        # PyTorch calls the tensor overload with a Python number for `x & 1`. These are the positions where that
        # overload, called from Python, does not accept a number, so that another overload is needed.
        self._no_scalars: frozenset[int] = frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        overload = self._operator or self._read_schema()
        operator: Callable[..., Any] = overload
        graph = self._recorder.active
        if graph is not None:
            self._recorder.check_capturable(overload, args, kwargs)
        host_args: list[Any] = []
        try:
            for position, value in enumerate(args):
                if isinstance(value, Tensor):
                    host_args.append(self._to_host(value, position))
                elif type(value) in (list, tuple):
                    host_args.append(_to_host_list(value))
                else:
                    host_args.append(value)
                    if position in self._no_scalars and isinstance(value, (int, float, complex)):
                        operator = overload.overloadpacket
            host_kwargs = self._to_host_kwargs(kwargs) if kwargs else {}
        except ForeignTensor:
            raise self._refusals.mixed_devices(overload._schema, args, kwargs) from None
        if self._deferral.enabled and graph is None:
            is_enqueued, outputs = self._enqueue(overload, operator, args, kwargs, host_args, host_kwargs)
            if is_enqueued:
                return outputs
        if self._random:
            operator = self._with_device_generator(operator, host_args, host_kwargs)
        result = operator(*host_args, **host_kwargs)
        outputs = (
            self._written_results(args, kwargs, host_args, host_kwargs, result)
            if self._written
            else self._to_device(result)
        )
        if graph is not None:
            self._record(graph, operator, host_args, host_kwargs, [*args, *kwargs.values()], outputs)
        return outputs

    def _enqueue(
        self,
        overload: torch._ops.OpOverload,
        operator: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host_args: list[Any],
        host_kwargs: dict[str, Any],
    ) -> tuple[bool, Any]:
        """Whether the operator was enqueued, and its results; if not, its stream has been waited for."""
        if self._random or depends_on_data(overload, args, {}) or self._name in RESIZING:
            self._deferral.wait()
            return False, None
        if len(self._written) == 1 and self._returned == (0,) and overload._schema.name.endswith("_"):
            self._deferral.enqueue(lambda: operator(*host_args, **host_kwargs))
            return True, args[self._written[0][0]]
        if self._written:
            return self._enqueue_out(operator, args, kwargs, host_args, host_kwargs)
        results = self._deferral.results_of(operator, host_args, host_kwargs)
        if results is None:
            self._deferral.wait()
            return False, None
        targets = tuple(host_view(result) for result in (results if isinstance(results, (list, tuple)) else [results]))
        self._deferral.enqueue(Call(self._name, operator, tuple(host_args), host_kwargs, targets).run)
        return True, results

    def _enqueue_out(
        self,
        operator: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host_args: list[Any],
        host_kwargs: dict[str, Any],
    ) -> tuple[bool, Any]:
        """The same for an operator with `out=`, which gets its final shape now."""
        shaped = self._deferral.run_on_meta(operator, host_args, host_kwargs)
        if shaped is None:
            self._deferral.wait()
            return False, None
        _, meta_args, meta_kwargs = shaped
        written = [
            (kwargs[name], host_kwargs[name], meta_kwargs[name])
            if name in kwargs
            else (args[position], host_args[position], meta_args[position])
            for position, name in self._written
        ]
        if not all(isinstance(tensor, Tensor) for tensor, _, _ in written):  # but a list of tensors
            self._deferral.wait()
            return False, None
        for tensor, view, like in written:
            if view.shape != like.shape:
                view.resize_(like.shape)
            self._adopt_view(tensor, view)
        self._deferral.enqueue(lambda: operator(*host_args, **host_kwargs))
        outputs = tuple(written[index][0] for index in self._returned if index is not None)
        return True, outputs[0] if len(outputs) == 1 else outputs

    def _record(
        self,
        graph: Graph,
        operator: Callable[..., Any],
        host_args: list[Any],
        host_kwargs: dict[str, Any],
        inputs: list[Any],
        outputs: Any,
    ) -> None:
        results = [outputs] if len(self._returned) == 1 else list(outputs or ())
        targets: list[Tensor | None] = []
        for written, value in zip(self._returned, results, strict=True):
            tensors = value if isinstance(value, (list, tuple)) else [value]
            targets += [host_view(one) if written is None and isinstance(one, Tensor) else None for one in tensors]
        name = operator_name(operator_named(self._name)._schema)
        graph.add(Call(name, operator, tuple(host_args), host_kwargs, tuple(targets)), inputs)

    def _read_schema(self) -> torch._ops.OpOverload:
        operator = operator_named(self._name)
        schema = operator._schema
        arguments = schema.arguments
        written = [
            (position, argument.name, argument.alias_info.before_set)
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._written = tuple((position, name) for position, name, _ in written)
        names = {argument.name: position for position, argument in enumerate(arguments)}
        self._positions = names
        self._device_only = frozenset(position for position, _ in self._written)
        self._device_only |= {names[name] for name in INDEX_ARGUMENTS & names.keys()}
        aliases = [alias for _, _, alias in written]
        self._returned = tuple(
            aliases.index(result.alias_info.before_set) if result.alias_info is not None else None
            for result in schema.returns
        )
        if not torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::")):
            tensors = (position for position, argument in enumerate(arguments) if str(argument.type) == "Tensor")
            self._no_scalars = frozenset(tensors)
        self._random = random_source(operator)
        self._operator = operator
        return operator

    # Operands, device to host

    def _to_host(self, value: Tensor, position: int) -> Tensor:
        """The host view of a device tensor, or the host scalar itself if `position` accepts one."""
        try:
            return host_view(value)
        except ForeignTensor:
            if is_host_scalar(value) and position not in self._device_only:
                return value
            raise

    def _to_host_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                converted[name] = self._to_host(value, self._positions[name])
            elif isinstance(value, torch.device):
                converted[name] = HOST
            elif type(value) in (list, tuple):
                converted[name] = _to_host_list(value)
            else:
                converted[name] = value
        return converted

    def _with_device_generator(
        self, operator: Callable[..., Any], host_args: list[Any], host_kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """`operator`, with random numbers from the device's generator."""
        if self._random == "generator":
            generator = next((value for value in host_args if isinstance(value, torch.Generator)), None)
            generator = host_kwargs.get("generator", generator)
            if generator is not None and generator is not self._generator:
                device = self._refusals.device
                raise RuntimeError(
                    f"{self._name}: expected the generator of {device} but was given one of {generator.device}."
                    " Leave it "
                    f"out and seed with torch.{device.partition(':')[0]}.manual_seed, or draw on the host and copy."
                )
            if generator is None:
                host_kwargs["generator"] = self._generator
            return operator

        def draw(*args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator.get_state())
                result = operator(*args, **kwargs)
                self._generator.set_state(torch.get_rng_state())
            return result

        return draw

    # Results, host to device

    def _written_results(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host_args: Sequence[Any],
        host_kwargs: Mapping[str, Any],
        result: Any,
    ) -> Any:
        """The results of an operator that writes arguments: those arguments, resized if necessary."""
        originals = []
        for position, name in self._written:
            if name in kwargs:
                tensor, view = kwargs[name], host_kwargs[name]
            else:
                tensor, view = args[position], host_args[position]
            if isinstance(tensor, Tensor):
                self._adopt_view(tensor, view)
            elif isinstance(tensor, (list, tuple)):
                for one, one_view in zip(tensor, view, strict=True):
                    self._adopt_view(one, one_view)
            originals.append(tensor)
        if not self._returned:
            return None
        results = (result,) if len(self._returned) == 1 else result
        outputs = tuple(
            originals[written] if written is not None else self._to_device(value)
            for written, value in zip(self._returned, results, strict=True)
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def _adopt_view(self, tensor: Tensor, view: Tensor) -> None:
        if view.shape != tensor.shape or view.stride() != tensor.stride():
            self._factory.adopt_view(tensor, view)

    def _to_device(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._factory.on_device(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._to_device(value) for value in result)
        return result


def _to_host_list(values: Any) -> Any:
    """A list argument: sizes, or device tensors."""
    if not values or type(values[0]) is int:
        return values
    return [_to_host_entry(value) for value in values]


def _to_host_entry(value: object) -> object:
    return host_view(value) if isinstance(value, Tensor) else value
