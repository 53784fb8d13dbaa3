"""The simulated HCCL: its rules, and the order of its operations. Groups of one member; the kit runs larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import BroadcastOptions, HashStore


@pytest.fixture
def group(sdk: Any) -> Iterator[Any]:
    if sdk is None:
        yield None
        return
    created = make_group(sdk, group_name="tensor")
    yield created
    created.abort()


def make_group(sdk: Any, **config: Any) -> Any:
    process_group = sdk._C._distributed_c10d.ProcessGroupHCCL
    options = process_group.Options()
    options.hccl_config = config
    return process_group(HashStore(), 0, 1, options)


def root(rank: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = rank
    return options


def on_card(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype).to("npu:0")


def test_sums_and_gathers(group: Any) -> None:
    x, gathered = on_card(2, 3), on_card(6) * 0
    group.allreduce([x]).wait()
    group._allgather_base(gathered, x.view(-1)).wait()
    assert x.cpu().tolist() == [[1.0] * 3] * 2
    assert gathered.cpu().tolist() == [1.0] * 6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_types_that_hccl_does_not_add_up(group: Any, dtype: torch.dtype) -> None:
    x = torch.zeros(4, dtype=torch.uint8).view(torch.uint8).to("npu:0")
    x = x.view(dtype) if dtype.itemsize == 1 else torch.zeros(4, dtype=dtype).to("npu:0")
    with pytest.raises(RuntimeError, match=r"allreduce: tensors: is .* must be int8 or int16"):
        group.allreduce([x])
    with pytest.raises(RuntimeError, match=r"_reduce_scatter_base: input: is .* must be int8 or int16"):
        group._reduce_scatter_base(torch.empty_like(x), x)
    group._allgather_base(torch.empty_like(x), x).wait()  # which moves bytes of any type
    group.alltoall_base(torch.empty_like(x), x, [], []).wait()
    group.broadcast([x], root(0)).wait()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: group.allreduce([torch.ones(2)]), "allreduce: tensors: is on cpu"),
        (lambda group: group.allreduce([on_card(2, 3).T]), "must be contiguous"),
        (lambda group: group.allreduce([on_card(2), on_card(2)]), "must be one: a process has one card"),
        (lambda group: group._allgather_base(on_card(3), on_card(2)), "must have 1 times the elements of input"),
        (lambda group: group._allgather_base(on_card(2), on_card(2).float()), "must have the dtype of input"),
        (lambda group: group.allreduce([on_card(3)[1:]]), "is at element 1 of its storage, must be at its beginning"),
        (lambda group: group._reduce_scatter_base(on_card(2), on_card(3)), "must have 1 times the elements of output"),
        (lambda group: group.alltoall_base(on_card(3), on_card(2), [], []), "must have the elements of input"),
        (lambda group: group.alltoall_base(on_card(2), on_card(2), [1], [2]), "sizes for 1 ranks that add up to 2"),
        (lambda group: group.alltoall_base(on_card(), on_card(), [], []), "must have at least one"),
        (lambda group: group.broadcast([on_card(2, 3).T], root(0)), "must be contiguous"),
        (lambda group: group.send([torch.ones(2)], 0, 0), "send: tensors: is on cpu"),
        (lambda group: group.recv([on_card(2)], -1, 0), "HCCL does not receive from any"),
    ],
)
def test_operands_that_hccl_refuses(group: Any, call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(group)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"buffer": 200}, "is 'buffer', must be one of hccl_buffer_size, group_name"),
        ({"hccl_buffer_size": "200"}, "is '200', must be of type int"),
        ({"group_name": "x" * 33}, "must have at most 32 characters"),
    ],
)
def test_options_that_hccl_refuses(sdk: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make_group(sdk, **config)


def test_a_program_that_does_not_wait_reads_old_values(sdk: Any, group: Any) -> None:
    sdk.npu.deferral.enabled = True
    try:
        for operation in (
            group._allgather_base,
            group._reduce_scatter_base,
            lambda output, x: group.alltoall_base(output, x, [], []),
        ):
            x, output = on_card(4), torch.zeros(4, dtype=torch.float16).to("npu:0")
            work = operation(output, x)
            assert output.cpu().tolist() == [0.0] * 4
            work.wait()
            assert output.cpu().tolist() == [1.0] * 4
    finally:
        sdk.npu.synchronize()
        sdk.npu.deferral.enabled = False


def test_replays_repeat_operations(sdk: Any, group: Any) -> None:
    x, total = on_card(4), on_card(4)
    graph = sdk.npu.NPUGraph()
    with sdk.npu.graph(graph):
        group._allgather_base(total, x * 2).wait()
        doubled = total * 2
    x.copy_(on_card(4) * 3)
    graph.replay()
    assert doubled.cpu().tolist() == [12.0] * 4
