"""Kernels: each of PyTorch's operators on the device, run by the host's kernel over the device's bytes.

    call ─> operands on one device? ─> host views ─> host kernel ─> results onto the device ─> into the graph

Every operator of the "aten" library that the host has is registered under its own name. Without that,
PyTorch would compose many from two or three others, each with a call of its own. Custom operators of other
libraries have no kernel here, as a new device has none: they raise NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import Call, Graph, Recorder, draws
from srv.testing.simulated_device.placement import HOST, INDEX_ARGUMENTS, is_number, operator_name
from srv.testing.simulated_device.refusals import Refusals
from srv.testing.simulated_device.tensors import HOST_KEY, HOST_KEYS, ForeignTensor, TensorFactory, host_view

# Operators that only make another view, or rewrite a tensor's shape: the host's kernel never touches bytes.
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

# Composed from others by PyTorch, but common enough here to run in one call.
ALSO_DIRECT = ("clone", "embedding", "stack", "index_put_", "index_put", "repeat", "_safe_softmax")

# What PyTorch asks a device it does not know for, and the host's operator that answers.
STAND_INS = {
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}


def operator_named(name: str) -> torch._ops.OpOverload:
    """The operator of that name, with or without overload ("add.Tensor", "clone"); of aten unless it says another."""
    library, _, short = name.rpartition("::")
    base, _, overload = short.partition(".")
    return getattr(getattr(getattr(torch.ops, library or "aten"), base), overload or "default")  # type: ignore[no-any-return]


def host_kernel_names() -> list[str]:
    """Names of the aten operators that the host implements itself, without the library's prefix."""
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
    """One operator on the device. Reads its schema at the first call, since most are never called."""

    __slots__ = (
        "_factory",
        "_generator",
        "_name",
        "_no_numbers",
        "_operator",
        "_positions",
        "_random",
        "_recorder",
        "_refusals",
        "_returned",
        "_strict",
        "_written",
    )

    def __init__(
        self,
        name: str,
        factory: TensorFactory,
        generator: torch.Generator,
        recorder: Recorder,
        refusals: Refusals,
    ) -> None:
        self._name = name
        self._factory = factory
        self._generator = generator
        self._recorder = recorder
        self._refusals = refusals
        self._operator: torch._ops.OpOverload | None = None
        # Filled from the schema: arguments that are written, as (position, name); positions that may not hold
        # a host number; for each result, the place in `_written` of the argument that it is, or None.
        self._written: tuple[tuple[int, str], ...] = ()
        self._strict: frozenset[int] = frozenset()
        self._positions: dict[str, int] = {}
        self._returned: tuple[int | None, ...] = ()
        self._random = ""
        # PyTorch hands `x & 1` to the overload for tensors, as a Python number; these are the positions where
        # that overload, called from Python, would not take one back, and another must be found.
        self._no_numbers: frozenset[int] = frozenset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        overload = self._operator or self._read_schema()
        operator: Callable[..., Any] = overload
        graph = self._recorder.active
        if graph is not None:
            self._recorder.admit(overload, args, kwargs)
        host_args: list[Any] = []
        try:
            for position, value in enumerate(args):
                if isinstance(value, Tensor):
                    host_args.append(self._lower(value, position))
                elif type(value) in (list, tuple):
                    host_args.append(_lower_list(value))
                else:
                    host_args.append(value)
                    if position in self._no_numbers and isinstance(value, (int, float, complex)):
                        operator = overload.overloadpacket
            host_kwargs = self._lower_kwargs(kwargs) if kwargs else {}
        except ForeignTensor:
            raise self._refusals.mixed_devices(overload._schema, args, kwargs) from None
        if self._random:
            operator = self._drawing(operator, host_args, host_kwargs)
        result = operator(*host_args, **host_kwargs)
        raised = self._settle(args, kwargs, host_args, host_kwargs, result) if self._written else self._raise(result)
        if graph is not None:
            self._record(graph, operator, host_args, host_kwargs, [*args, *kwargs.values()], raised)
        return raised

    def _record(
        self,
        graph: Graph,
        operator: Callable[..., Any],
        host_args: list[Any],
        host_kwargs: dict[str, Any],
        inputs: list[Any],
        raised: Any,
    ) -> None:
        results = [raised] if len(self._returned) == 1 else list(raised or ())
        targets: list[Tensor | None] = []
        for place, value in zip(self._returned, results, strict=True):
            some = value if isinstance(value, (list, tuple)) else [value]
            targets += [host_view(one) if place is None and isinstance(one, Tensor) else None for one in some]
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
        self._strict = frozenset(position for position, _ in self._written)
        self._strict |= {names[name] for name in INDEX_ARGUMENTS & names.keys()}
        aliases = [alias for _, _, alias in written]
        self._returned = tuple(
            aliases.index(result.alias_info.before_set) if result.alias_info is not None else None
            for result in schema.returns
        )
        if not torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::")):
            tensors = (position for position, argument in enumerate(arguments) if str(argument.type) == "Tensor")
            self._no_numbers = frozenset(tensors)
        self._random = draws(operator)
        self._operator = operator
        return operator

    # Operands, down to the host

    def _lower(self, value: Tensor, position: int) -> Tensor:
        """The host view of a device tensor, or a host tensor that stands for a number at `position`."""
        try:
            return host_view(value)
        except ForeignTensor:
            if is_number(value) and position not in self._strict:
                return value
            raise

    def _lower_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        lowered: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                lowered[name] = self._lower(value, self._positions[name])
            elif isinstance(value, torch.device):
                lowered[name] = HOST
            elif type(value) in (list, tuple):
                lowered[name] = _lower_list(value)
            else:
                lowered[name] = value
        return lowered

    def _drawing(
        self, operator: Callable[..., Any], host_args: list[Any], host_kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """`operator`, drawing its random numbers from the device's own generator."""
        if self._random == "generator":
            given = next((value for value in host_args if isinstance(value, torch.Generator)), None)
            given = host_kwargs.get("generator", given)
            if given is not None and given is not self._generator:
                device = self._refusals.device
                raise RuntimeError(
                    f"{self._name}: expected the generator of {device} but was given one of {given.device}. Leave it "
                    f"out and seed with torch.{device.partition(':')[0]}.manual_seed, or draw on the host and copy."
                )
            if given is None:
                host_kwargs["generator"] = self._generator
            return operator

        def draw(*args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator.get_state())
                result = operator(*args, **kwargs)
                self._generator.set_state(torch.get_rng_state())
            return result

        return draw

    # Results, up to the device

    def _settle(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        host_args: Sequence[Any],
        host_kwargs: Mapping[str, Any],
        result: Any,
    ) -> Any:
        """Results of an operator that writes arguments: those arguments themselves, resized if they were."""
        originals = []
        for position, name in self._written:
            if name in kwargs:
                tensor, view = kwargs[name], host_kwargs[name]
            else:
                tensor, view = args[position], host_args[position]
            if isinstance(tensor, Tensor):
                self._follow(tensor, view)
            elif isinstance(tensor, (list, tuple)):
                for one, one_view in zip(tensor, view, strict=True):
                    self._follow(one, one_view)
            originals.append(tensor)
        if not self._returned:
            return None
        results = (result,) if len(self._returned) == 1 else result
        raised = tuple(
            originals[place] if place is not None else self._raise(value)
            for place, value in zip(self._returned, results, strict=True)
        )
        return raised[0] if len(raised) == 1 else raised

    def _follow(self, tensor: Tensor, view: Tensor) -> None:
        if view.shape != tensor.shape or view.stride() != tensor.stride():
            self._factory.follow(tensor, view)

    def _raise(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._factory.on_device(result)
        if isinstance(result, (list, tuple)):
            return type(result)(self._raise(value) for value in result)
        return result


def _lower_list(values: Any) -> Any:
    """A list argument: sizes, or tensors, none of which may be the host's."""
    if not values or type(values[0]) is int:
        return values
    return [_lower_entry(value) for value in values]


def _lower_entry(value: object) -> object:
    return host_view(value) if isinstance(value, Tensor) else value
