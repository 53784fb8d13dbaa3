"""Operators have exactly the same results on the device as on the host, including aliasing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
INDEX = torch.tensor([4, 0, 3])
HEADS = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(4))

Operation = Callable[..., Any]

# name: (operation, operands). The operands are moved to the device, or not.
OPERATIONS: dict[str, tuple[Operation, tuple[Tensor, ...]]] = {
    "arithmetic": (lambda x, y: (x + y) * 2 - x / (y + 3) ** 2, (X, Y)),
    "unary": (lambda x: (x.exp(), x.sin(), x.abs().sqrt(), x.neg(), x.rsqrt().nan_to_num(), x.sigmoid()), (X,)),
    "activations": (lambda x: (F.silu(x), F.gelu(x), F.relu(x), x.tanh(), F.softplus(x)), (X,)),
    "compare": (lambda x, y: (x > y, x == x, x.isnan(), torch.maximum(x, y), x.clamp(-1, 1)), (X, Y)),
    "logical": (lambda x, y: ((x > 0) & (y > 0), ~(x > 0), (x > 0).any(), (x > 0).all(-1)), (X, Y)),
    "cast": (lambda x: (x.half(), x.bfloat16(), x.double(), x.long(), x.bool(), x.to(torch.float8_e4m3fn)), (X,)),
    "linear": (lambda x, w: (F.linear(x, w), F.linear(x, w, w[0]), F.linear(x[None], w)), (X, W)),
    "linear_bf16": (lambda x, w: F.linear(x.bfloat16(), w.bfloat16()), (X, W)),
    "linear_f16": (lambda x, w: F.linear(x.half(), w.half(), w[0].half()), (X, W)),
    "matmul": (lambda x, w: (x @ w, torch.bmm(x[None], w[None]), torch.addmm(w[0], x, w), torch.mv(x, w[0])), (X, W)),
    "einsum": (lambda x, w: torch.einsum("td,kd->tk", x, w), (X, W)),
    "norms": (lambda x, w: (F.layer_norm(x, (8,), w[0], w[1]), F.rms_norm(x, (8,), w[0], 1e-6)), (X, W)),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1), torch.softmax(x, 0).bfloat16()), (X,)),
    "reduce": (lambda x: (x.sum(), x.mean(-1), x.amax(0), x.var(-1), x.prod(-1), x.norm(dim=-1)), (X,)),
    "argmax": (lambda x: (x.argmax(-1), x.argmin(), x.max(-1), x.min(0), x.max()), (X,)),
    "sort": (lambda x: (x.sort(dim=-1, descending=True, stable=True), x.argsort(), x.topk(3), x.median(-1)), (X,)),
    "cumulative": (lambda x: (x.cumsum(-1), x.cumprod(0), x.cummax(-1), x.logcumsumexp(-1)), (X,)),
    "index": (lambda x, i: (x[i], x[i, i], x[:, i], x[1:4, ::2], x[-1], x[None], x[x > 0]), (X, INDEX)),
    "index_select": (lambda x, i: (x.index_select(0, i), x.take(i), x.take_along_dim(i[:, None], 0)), (X, INDEX)),
    "gather": (lambda x, i: (x.gather(0, i[:, None]), F.embedding(i, x), F.one_hot(i, 6)), (X, INDEX)),
    "scatter": (lambda x, i: (x.scatter(0, i[:, None], 2.0), x.scatter_add(0, i[:, None], x[:3])), (X, INDEX)),
    "index_write": (lambda x, i: (x.index_copy(0, i, x[:3]), x.index_add(0, i, x[:3])), (X, INDEX)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1), (X, INDEX)),
    "index_put": (lambda x, i: x.index_put((i,), x[:3], accumulate=True), (X, INDEX)),
    "masked": (lambda x: (x.masked_fill(x > 0, 0.5), x.masked_select(x > 0), torch.where(x > 0, x, 0.0)), (X,)),
    "shape": (lambda x: (x.reshape(3, -1), x.T, x.flatten(), x.view(2, 3, 8), x.unflatten(1, (2, 4))), (X,)),
    "views": (lambda x: (x.unsqueeze(0).expand(3, 6, 8), x.narrow(0, 1, 2), x.diagonal(), x.movedim(0, 1)), (X,)),
    "pieces": (lambda x: (x.chunk(2, -1), x.split([2, 4]), x.unbind(0), x.tensor_split(3), x.unfold(1, 4, 2)), (X,)),
    "join": (lambda x, y: (torch.cat([x, y], -1), torch.stack([x, y]), x.repeat(2, 1), x.roll(1, 0)), (X, Y)),
    "repeat_interleave": (lambda i: (i.repeat_interleave(2), torch.repeat_interleave(i), i.bincount()), (INDEX,)),
    "triangle": (lambda x: (x.tril(), x.triu(1), torch.ones_like(x), torch.zeros_like(x), x.new_full((2,), 3)), (X,)),
    "integers": (lambda i: (i // 2, i % 2, i << 1, i ^ 1, -i, i.unique(), (i == 3).nonzero()), (INDEX,)),
    "search": (lambda x: (torch.searchsorted(x[0].sort()[0], x[1]), torch.bucketize(x, x[0].sort()[0])), (X,)),
    "nextafter": (lambda x, y: (torch.nextafter(x, y), torch.lerp(x, y, 0.3), torch.hypot(x, y)), (X, Y)),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 4, 2)).conj() * 1j), (X,)),
    "foreach": (lambda x, y: (torch._foreach_add([x, y], 1.0), torch._foreach_mul([x], [y])), (X, Y)),
    "convolution": (lambda x, w: F.conv1d(x[None], w[:, :6, None]), (X, W)),
    "dequantise": (lambda i: (i.to(torch.uint8).view(torch.uint8) & 1).to(torch.float32) * 0.5, (INDEX,)),
    "bits": (lambda x: (x.view(torch.int32), x.view(torch.int32) >> 3, x.half().view(torch.int16)), (X,)),
    "scalars": (lambda x: (x.sum().item(), float(x[0, 0]), x.tolist(), bool((x > 99).any()), int(x.argmax())), (X,)),
}  # fmt: skip


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert got.device.type == "sim"
        assert got.dtype is wanted.dtype
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    elif isinstance(wanted, tuple | list):
        assert len(got) == len(wanted)
        for one, one_wanted in zip(got, wanted, strict=True):
            same(one, one_wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_device_computes_what_the_host_computes(name: str, mode: Callable[[], Any]) -> None:
    operation, operands = OPERATIONS[name]
    with mode():
        wanted = operation(*(operand.clone() for operand in operands))
        same(operation(*(operand.to("sim") for operand in operands)), wanted)


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda q: F.scaled_dot_product_attention(q, q, q),
    "causal": lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3),
    "grouped": lambda q: F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True),
    "masked": lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=q[:, :, :, :5] > -1),
    "bfloat16": lambda q: F.scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), q.bfloat16()).float(),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_scaled_dot_product_attention(name: str) -> None:
    """PyTorch decomposes it into other operators here, so rounding differs from the host's fused kernel."""
    got = ATTENTION[name](HEADS.to("sim"))
    assert got.device.type == "sim"
    torch.testing.assert_close(got.cpu(), ATTENTION[name](HEADS), atol=2e-2 if name == "bfloat16" else 1e-6, rtol=0)


FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "ones": lambda device: torch.ones(2, dtype=torch.int32, device=device),
    "full": lambda device: torch.full((2,), 7, device=device),
    "arange": lambda device: torch.arange(2, 9, 3, device=device),
    "arange_float": lambda device: torch.arange(0, 1, 0.25, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tensor": lambda device: torch.tensor([[1.5], [2.5]], device=device),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "empty_strided": lambda device: torch.empty_strided((2, 3), (1, 2), device=device).fill_(4),
    "nothing": lambda device: torch.zeros(0, 3, device=device) @ torch.zeros(3, 2, device=device),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    same(FACTORIES[name]("sim"), FACTORIES[name]("cpu"))


def test_in_place_operators_return_their_tensor_and_show_through_views() -> None:
    x = torch.zeros(4, 4, device="sim")
    row, column = x[1], x[:, 2]
    assert x.add_(1) is x
    row.mul_(3)
    column[0] = 5
    assert x.tolist() == [[1, 1, 5, 1], [3, 3, 3, 3], [1, 1, 1, 1], [1, 1, 1, 1]]
    x[2:, :2] = torch.tensor(9.0)
    x[x == 9] += 1
    assert x[2].tolist() == [10, 10, 1, 1]
    x.view(-1).index_copy_(0, torch.tensor([15], device="sim"), torch.tensor([7.0], device="sim"))
    assert x[3, 3].item() == 7


def test_out_arguments_are_written_and_returned() -> None:
    x = torch.arange(4.0, device="sim")
    pool = torch.zeros(2, 4, device="sim")
    out = pool[1]
    assert torch.add(x, 1, out=out) is out
    assert pool.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    values, indices = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.int64, device="sim")
    result = torch.topk(x, 2, out=(values, indices))
    assert result[0] is values
    assert (values.tolist(), indices.tolist()) == ([3, 2], [3, 2])


def test_strides_that_change_in_place_are_followed() -> None:
    host, x = torch.empty(1, 2, 2, 3), torch.empty(1, 2, 2, 3, device="sim")
    for tensor in (host, x):
        tensor.resize_(1, 2, 2, 3, memory_format=torch.channels_last)
    assert x.stride() == host.stride() == (12, 1, 6, 2)


def test_shape_changes_in_place_are_followed() -> None:
    x = torch.arange(6.0, device="sim").view(2, 3)
    x.add_(1)  # now the kernel has cached the tensor's first shape
    x.t_()
    assert x.mul(2).tolist() == [[2, 8], [4, 10], [6, 12]]
    x.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    assert x.mul(2).tolist() == [[2, 4, 6], [8, 10, 12]]
    x.data = x.data.view(3, 2)
    assert x.mul(2).tolist() == [[2, 4], [6, 8], [10, 12]]
    x.data = x.data.view(torch.int32)
    assert x.dtype is torch.int32
    assert x.bitwise_and(0).tolist() == [[0, 0]] * 3
    x.set_(torch.arange(2, dtype=torch.int32, device="sim"))
    assert x.mul(2).tolist() == [0, 2]


def test_foreach_in_place() -> None:
    tensors = [torch.ones(2, device="sim"), torch.ones(3, device="sim")]
    torch._foreach_add_(tensors, 1.0)
    torch._foreach_mul_(tensors, tensors)
    assert [tensor.tolist() for tensor in tensors] == [[4, 4], [4, 4, 4]]


def test_tensors_pass_between_inference_mode_and_the_rest() -> None:
    normal = torch.ones(3, device="sim")
    with torch.inference_mode():
        doubled = normal * 2
        normal.add_(1)
        doubled.add_(normal)
    assert doubled.is_inference()
    assert not normal.is_inference()
    normal.add_(1)
    assert (doubled + normal).tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        doubled.add_(1)


def test_gradients_flow() -> None:
    host = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1))
    device = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.SiLU(), torch.nn.Linear(4, 1)).to("sim")
    device.load_state_dict(host.state_dict())
    host(X).square().sum().backward()
    device(X.to("sim")).square().sum().backward()
    for one, wanted in zip(device.parameters(), host.parameters(), strict=True):
        assert one.grad is not None
        assert wanted.grad is not None
        assert torch.equal(one.grad.cpu(), wanted.grad)
