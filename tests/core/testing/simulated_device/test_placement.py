"""Operators refuse tensors on different devices, except for scalars on the host and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

MIXED = "Expected all tensors to be on the same device"

Operation = Callable[[Tensor, Tensor], object]

# Each is called with the host's tensor and the device's in every order: (host, device) and (device, host).
REFUSED: dict[str, Operation] = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.clone().add_(b),
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "compare": lambda a, b: a == b,
    "equal": torch.equal,
    "maximum": torch.maximum,
    "mm": lambda a, b: a @ b,
    "bmm": lambda a, b: a[None] @ b[None],
    "linear": F.linear,
    "addmm": lambda a, b: torch.addmm(a, b, b),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], b[None], b[None]),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0),
    "masked_scatter": lambda a, b: a.masked_scatter(b > 0, b),
    "sdpa": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None]),
    "layer_norm": lambda a, b: F.layer_norm(a, (4,), b[0]),
    "rms_norm": lambda a, b: F.rms_norm(a, (4,), b[0]),
    "out": lambda a, b: torch.add(a, a, out=b),
    "out_sin": lambda a, b: torch.sin(a, out=b),
    "foreach": lambda a, b: torch._foreach_add([a, a], [b, b]),
    "foreach_": lambda a, b: torch._foreach_mul_([a.clone()], [b]),
    "set": lambda a, b: a.clone().set_(b),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operands_on_two_devices_are_refused(name: str) -> None:
    host = torch.rand(4, 4) + 0.5
    device = host.to("sim")
    for first, second in ((host, device), (device, host)):
        with pytest.raises(RuntimeError, match=r"device"):
            REFUSED[name](first, second)


INDEXED: dict[str, Operation] = {
    "getitem": lambda x, index: x[index],
    "setitem": lambda x, index: x.__setitem__(index, 1.0),
    "index_select": lambda x, index: x.index_select(0, index),
    "index_copy_": lambda x, index: x.index_copy_(0, index, x[:2] + 1),
    "index_add_": lambda x, index: x.index_add_(0, index, x[:2] + 1),
    "index_fill_": lambda x, index: x.index_fill_(0, index, 2.0),
    "index_put_": lambda x, index: x.index_put_((index,), x[:2] + 1),
    "gather": lambda x, index: x.gather(0, index[:, None]),
    "scatter": lambda x, index: x.scatter(0, index[:, None], 1.0),
    "take": lambda x, index: x.take(index),
    "embedding": lambda x, index: F.embedding(index, x),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_must_lie_on_the_device_of_what_it_indexes(name: str) -> None:
    host, host_index = torch.rand(4, 4), torch.tensor([2, 0])
    with pytest.raises(RuntimeError, match=MIXED):
        INDEXED[name](host.to("sim"), host_index)
    with pytest.raises(RuntimeError, match=MIXED):
        INDEXED[name](host, host_index.to("sim"))
    INDEXED[name](host.to("sim"), host_index.to("sim"))


def test_boolean_masks_must_lie_on_the_device() -> None:
    x = torch.arange(4.0, device="sim")
    with pytest.raises(RuntimeError, match=MIXED):
        x[torch.tensor([True, False, True, False])]


def test_the_error_names_operator_arguments_and_devices() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, device="sim") + torch.ones(2)
    text = str(caught.value)
    assert "aten::add.Tensor" in text
    assert "self (argument 1) on sim:0" in text
    assert "other (argument 2) on cpu" in text
    with pytest.raises(RuntimeError, match=r"tensors\[1\] \(argument 1\) on cpu"):
        torch.cat([torch.ones(2, device="sim"), torch.ones(2)])


def test_meta_tensors_do_not_mix_either() -> None:
    x = torch.ones(2, device="sim")
    for operation in (torch.add, torch.dot, torch.maximum):
        with pytest.raises((RuntimeError, IndexError), match="device"):
            operation(x, torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        torch.cat([x, torch.ones(2, device="meta")])


def test_host_numbers_mix_as_operands_but_are_not_written_and_are_no_index() -> None:
    x = torch.arange(3.0, device="sim")
    number = torch.tensor(2.0)
    assert (x * number).tolist() == [0.0, 2.0, 4.0]
    assert (number - x).tolist() == [2.0, 1.0, 0.0]
    assert torch.where(x > 1, x, number).tolist() == [2.0, 2.0, 2.0]
    assert (x * number).device.type == "sim"
    x[1] = number
    assert x.tolist() == [0.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match=MIXED):
        number.add_(torch.tensor(1.0, device="sim"))
    with pytest.raises(RuntimeError, match=MIXED):
        x.index_select(0, torch.tensor(1))


def test_copies_cross_in_both_directions() -> None:
    host = torch.randn(3, 4)
    device = host.to("sim")
    assert device.device == torch.device("sim", 0)
    assert torch.equal(device.cpu(), host)
    assert torch.equal(device.to("cpu", torch.float64), host.double())
    assert torch.equal(host.to("sim", torch.bfloat16).cpu(), host.bfloat16())
    assert torch.equal(torch.empty(3, 4, device="sim").copy_(host).cpu(), host)
    assert torch.equal(torch.empty(3, 4).copy_(device), host)
    assert torch.equal(torch.empty(4, 3, device="sim").copy_(host.T).cpu(), host.T)
    device[1:2].copy_(torch.zeros(1, 4))
    assert device.tolist()[1] == [0.0] * 4
    assert torch.tensor([1, 2], device="sim").tolist() == [1, 2]


def test_a_copy_is_a_copy() -> None:
    host = torch.zeros(2)
    device = host.to("sim")
    device += 1
    host -= 1
    assert device.tolist() == [1.0, 1.0]
    assert host.tolist() == [-1.0, -1.0]


def test_a_module_left_on_the_host_fails_and_a_moved_one_works() -> None:
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    wanted = layer(x)
    with pytest.raises(RuntimeError, match=MIXED):
        layer(x.to("sim"))
    layer.to("sim")
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert torch.equal(layer(x.to("sim")).cpu(), wanted)
    assert torch.equal(copy.deepcopy(layer)(x.to("sim")).cpu(), wanted)
    assert torch.equal(layer.cpu()(x), wanted)


def test_the_host_cannot_look_into_device_memory() -> None:
    x = torch.ones(4, device="sim")
    with pytest.raises(TypeError, match="sim:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises((RuntimeError, ValueError, TypeError, BufferError)):
        memoryview(x)
    assert x.tolist() == [1.0] * 4
    assert "device='sim:0'" in repr(x)


def test_there_is_one_device() -> None:
    assert torch.sim.device_count() == 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(2, device="sim:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.sim.set_device(1)  # type: ignore[attr-defined]


def test_pinned_memory_is_refused() -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[pP]in"):
        torch.empty(2, device="sim", pin_memory=True)


def test_a_custom_operator_without_a_kernel_for_the_device_is_refused() -> None:
    library = torch.library.Library("sim_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("double(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("double", lambda x: x * 2, "CPU")  # type: ignore[no-untyped-call]
    assert torch.ops.sim_test.double(torch.ones(1)).tolist() == [2.0]
    with pytest.raises(NotImplementedError, match="sim"):
        torch.ops.sim_test.double(torch.ones(1, device="sim"))
