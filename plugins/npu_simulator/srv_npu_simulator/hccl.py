"""`torch_npu._C._distributed_c10d.ProcessGroupHCCL`, between processes that simulate one card each.

Its refusals are those of torch_npu's group and the ones that Huawei's documentation of HCCL states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.collectives import SimulatedProcessGroup, Work
from srv_npu_simulator.device import Accelerator
from srv_npu_simulator.operators.checks import Rules, check_placement, refuse

# What HCCL adds up, from the types of torch that it has names for.
SUMMED = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
)
# Fields of `Options.hccl_config` and their types.
_CONFIG: Mapping[str, type] = {
    "hccl_buffer_size": int,  # MB, of which each communicator has two
    "group_name": str,
    "qos_traffic_class": int,
    "qos_service_level": int,
    "hccl_op_expansion_mode": int,
    "hccl_world_rank_id": int,
    "hccl_job_id": int,
}
_MAX_NAME = 32  # characters of a group's name, by the documentation; the code takes 127
_DEFAULT_TIMEOUT = timedelta(seconds=1800)


@dataclass(slots=True)
class Options:
    """`ProcessGroupHCCL.Options`: `_timeout` of operations, and `hccl_config`, which outranks the environment."""

    _timeout: timedelta = _DEFAULT_TIMEOUT
    op_timeout: timedelta = _DEFAULT_TIMEOUT
    is_high_priority_stream: bool = False
    global_ranks_in_group: list[int] = field(default_factory=list)
    group_id: str = ""
    hccl_config: dict[str, Any] = field(default_factory=dict)


class ProcessGroupHCCL(SimulatedProcessGroup):
    """The part of the group that srv calls, with HCCL's rules. `process_group_class` binds it to a card."""

    Options = Options
    accelerator: Accelerator

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        _check_config(options.hccl_config)
        super().__init__(self.accelerator, store, rank, size, options._timeout, RuntimeError)
        self._size = size

    def fail_with(self, lost: Callable[[str], Exception]) -> None:
        """lost(reason): the error of an operation that a member does not join, in place of RuntimeError."""
        self._lost = lost

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Work:
        rules = _checked("allreduce", tensors)
        rules.dtype("tensors", tensors[0], SUMMED)
        return super().allreduce(tensors, options)

    def _allgather_base(self, output: Tensor, input: Tensor) -> Work:
        rules = _checked_pair("_allgather_base", output, input)
        rule = f"must have {self._size} times the elements of input, which has {input.numel()}"
        rules.require(output.numel() == self._size * input.numel(), "output", f"of {output.numel()} elements", rule)
        return super()._allgather_base(output, input)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor) -> Work:
        rules = _checked_pair("_reduce_scatter_base", output, input)
        rules.dtype("input", input, SUMMED)
        rule = f"must have {self._size} times the elements of output, which has {output.numel()}"
        rules.require(input.numel() == self._size * output.numel(), "input", f"of {input.numel()} elements", rule)
        return super()._reduce_scatter_base(output, input)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> Work:
        rules = _checked_pair("alltoall_base", output, input)
        for name, tensor, sizes in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
            rules.require(tensor.dim() > 0, name, "without dimensions", "must have at least one")
            if sizes:
                rule = f"must be sizes for {self._size} ranks that add up to {len(tensor)}"
                fits = len(sizes) == self._size and sum(sizes) == len(tensor)
                rules.require(fits, f"{name}_split_sizes", str(list(sizes)), rule)
            else:
                rule = f"must have a first dimension that {self._size} divides"
                rules.require(len(tensor) % self._size == 0, name, f"of shape {tuple(tensor.shape)}", rule)
        if not output_split_sizes and not input_split_sizes:
            rule = f"must have the elements of input, which has {input.numel()}"
            rules.require(output.numel() == input.numel(), "output", f"of {output.numel()} elements", rule)
        return super().alltoall_base(output, input, output_split_sizes, input_split_sizes)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        _checked("broadcast", tensors)
        return super().broadcast(tensors, options)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Work:
        _checked("send", tensors)
        return super().send(tensors, target, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        rules = _checked("recv", tensors)
        rules.require(source >= 0, "source", str(source), "must be a rank: HCCL does not receive from any")
        return super().recv(tensors, source, tag)


def process_group_class(accelerator: Accelerator) -> type[ProcessGroupHCCL]:
    """The class whose groups compute on that card."""
    return type("ProcessGroupHCCL", (ProcessGroupHCCL,), {"accelerator": accelerator})


def _checked(operator: str, tensors: Sequence[Tensor]) -> Rules:
    """The rules of an operation on one tensor, which it replaces or sends, after those that all of them have."""
    rules = Rules(operator)
    check_placement(operator, ("tensors",), (tensors,), {})
    rules.require(len(tensors) == 1, "tensors", f"{len(tensors)} tensors", "must be one: a process has one card")
    _check_memory(rules, "tensors", tensors[0])
    return rules


def _checked_pair(operator: str, output: Tensor, input: Tensor) -> Rules:
    rules = Rules(operator)
    check_placement(operator, ("output", "input"), (output, input), {})
    rules.same_dtype("output", output, "input", input.dtype)
    _check_memory(rules, "output", output)
    _check_memory(rules, "input", input)
    return rules


def _check_memory(rules: Rules, name: str, tensor: Tensor) -> None:
    rules.contiguous(name, tensor)
    offset = tensor.storage_offset()
    rules.require(offset == 0, name, f"at element {offset} of its storage", "must be at its beginning")


def _check_config(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        expected = _CONFIG.get(name)
        if expected is None:
            refuse("ProcessGroupHCCL", "hccl_config", repr(name), f"must be one of {', '.join(_CONFIG)}")
        if type(value) is not expected:
            refuse("ProcessGroupHCCL", f"hccl_config[{name!r}]", repr(value), f"must be of type {expected.__name__}")
    name = config.get("group_name", "")
    if len(name) > _MAX_NAME:
        refuse("ProcessGroupHCCL", "hccl_config['group_name']", repr(name), f"must have at most {_MAX_NAME} characters")
