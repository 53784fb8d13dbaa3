"""Ops of `srv_kernels.contracts`, and matrix products, by the native library. float32 and bfloat16, host memory.

Import raises ImportError where the library cannot be used; ask `library.load()` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref

import torch
from torch import Tensor

from srv_kernels.cpu.library import BlockLinearArgs, BlockRowsArgs, ByteLinearArgs, DrawArgs, load
from srv_kernels.cpu.room import Room

_loaded = load()
if _loaded.library is None:
    raise ImportError(f"the native CPU kernels cannot be used: {_loaded.reason}")
_library = _loaded.library
TYPES = {torch.float32: 0, torch.bfloat16: 1}
POOL_TYPES = {**TYPES, torch.int8: 2, torch.float16: 3}  # of keys and values
_OWN = (None, None, None, None)  # scratch: the library has its own
_PACKED_TYPES = {**TYPES, torch.int8: 2}


def set_threads(count: int) -> None:
    """Threads that every kernel runs on from now on, the caller's own included."""
    _library.srv_set_threads(count)


def _rows(x: Tensor) -> Tensor:
    """x as a matrix whose rows' elements lie beside one another; a copy only where it must be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _rows_of(x: Tensor, inputs: int, bias: Tensor | None) -> Tensor:
    """x as the rows of a product. Raises ValueError where the kernels would read past them, or take them for others."""
    if x.shape[-1] != inputs:
        raise ValueError(f"{x.shape[-1]} inputs for a weight of {inputs}")
    if x.dtype not in TYPES or (bias is not None and bias.dtype != x.dtype):
        beside = "" if bias is None else f" and a bias of {bias.dtype}"
        raise ValueError(
            f"inputs of {x.dtype}{beside}: native products take {' or '.join(map(str, TYPES))}, both alike"
        )
    return x if x.dim() == 2 and x.stride(1) == 1 else _rows(x)


def _check_outputs(outputs: int, **others: Tensor | None) -> None:
    """Raises ValueError where what goes with each output is not one for each."""
    for name, other in others.items():
        if other is not None and tuple(other.shape) != (outputs,):
            raise ValueError(f"{name} of shape {tuple(other.shape)} for a weight of {outputs} outputs")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D]."""
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    count, dim = rows.shape
    _library.srv_norm(
        TYPES[x.dtype], out.data_ptr(), rows.data_ptr(), weight.data_ptr(), count, dim, rows.stride(0), eps
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] -> (rms_norm(residual + x), residual + x)."""
    rows, before = _rows(x), _rows(residual)
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    count, dim = rows.shape
    _library.srv_add_norm(
        TYPES[x.dtype],
        out.data_ptr(),
        total.data_ptr(),
        rows.data_ptr(),
        before.data_ptr(),
        weight.data_ptr(),
        count,
        dim,
        rows.stride(0),
        before.stride(0),
        eps,
    )
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
    rows = _rows(x)
    count, dim = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype)
    _library.srv_gate(TYPES[x.dtype], out.data_ptr(), rows.data_ptr(), count, dim, rows.stride(0))
    return out


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T] -> (q', k')."""
    q, k = _heads(q), _heads(k)
    tokens, heads, dim = q.shape
    turned_q, turned_k = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    _library.srv_rotary(
        TYPES[q.dtype],
        turned_q.data_ptr(),
        turned_k.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        cos_sin.data_ptr(),
        positions.data_ptr(),
        tokens,
        heads,
        k.shape[1],
        dim,
        cos_sin.shape[1],
        q.stride(0),
        k.stride(0),
    )
    return turned_q, turned_k


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] -> (int64 [T]: the place of the largest, the first among equals; bool [T]: whether there is one).

    There is none, and the place is 0, where a logit is NaN or +inf, or all are -inf.
    """
    rows = _rows(logits)
    count, vocab = rows.shape
    tokens, finite = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
    _library.srv_most_likely(
        TYPES[rows.dtype], tokens.data_ptr(), finite.data_ptr(), rows.data_ptr(), count, vocab, rows.stride(0)
    )
    return tokens, finite


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """logits [T, V] -> int64 [T]: tokens drawn as `srv.platform.interface.SamplingBackend` has it.

    temperature, top_p, min_p: float32 [T]; top_k: int32 [T], from 1 on; uniform: float64 [T] in [0, 1). A row whose
    logits are not finite (see `most_likely`) gets token 0. Weights are float32, and their sums float64, but for those
    of 16 tokens at most in a row without filters.
    """
    rows = _rows(logits)
    count, vocab = rows.shape
    columns = [each.contiguous() for each in (temperature, top_k, top_p, min_p, uniform)]
    tokens = torch.empty(count, dtype=torch.int64)
    args = DrawArgs(
        rows.data_ptr(), *(each.data_ptr() for each in columns), tokens.data_ptr(), count, vocab, rows.stride(0)
    )
    _library.srv_draw(TYPES[rows.dtype], byref(args))
    return tokens


def _heads(x: Tensor) -> Tensor:
    """[T, H, D] whose heads lie one after the other; only the token axis may have another stride."""
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) else x.contiguous()


def _memory(size: int, room: Room | None) -> Tensor:
    return torch.empty(size, dtype=torch.uint8) if room is None else room.take(size)


def pack(weight: Tensor, room: Room | None = None) -> Tensor:
    """[outputs, inputs] -> the same numbers in blocks, as `linear` reads them (native/linear.cpp); flat.

    They lie in `room`, if one is given, as everything does that is packed here.
    """
    rows = _rows(weight)
    outputs, inputs = rows.shape
    size = _library.srv_packed_elements(outputs, inputs) * weight.itemsize
    packed = _memory(size, room).view(weight.dtype)
    _library.srv_pack(_PACKED_TYPES[weight.dtype], packed.data_ptr(), rows.data_ptr(), outputs, inputs, rows.stride(0))
    return packed


def linear(weight: Tensor, bias: Tensor | None, room: Room | None = None) -> Callable[[Tensor], Tensor]:
    """The product with a weight [outputs, inputs] and bias [outputs], of one dtype: x [T, inputs] -> [T, outputs].

    The weight is packed, that is copied, once; afterwards only the copy is used. Raises ValueError for shapes and
    dtypes that do not go together, as the product does.
    """
    outputs, inputs = weight.shape
    _check_outputs(outputs, bias=bias)
    packed, kind = pack(weight, room), TYPES[weight.dtype]
    bias = None if bias is None else bias.contiguous()
    weight_at, bias_at = packed.data_ptr(), None if bias is None else bias.data_ptr()
    product, dtype = _library.srv_linear, weight.dtype

    def multiply(x: Tensor, _keep: tuple[Tensor, Tensor | None] = (packed, bias)) -> Tensor:
        rows = _rows_of(x, inputs, bias)
        if rows.dtype != dtype:
            raise ValueError(f"inputs of {rows.dtype} for a weight of {dtype}")
        out = torch.empty(rows.shape[0], outputs, dtype=dtype)
        product(
            kind, out.data_ptr(), rows.data_ptr(), weight_at, bias_at, rows.shape[0], inputs, outputs, rows.stride(0)
        )
        return out

    return multiply


class ScaledLinear:
    """The product with a weight of 8-bit integers [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

    Activations keep their dtype. scales: float32 [outputs]. bias: [outputs] of x's dtype, added last. The weight is
    packed, that is copied, once; afterwards only the copy is used.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, room: Room | None = None) -> None:
        self._outputs, self._inputs = weight.shape
        _check_outputs(self._outputs, scales=scales, bias=bias)
        self._packed, self._scales, self._bias = pack(weight, room), scales.float().contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = _rows_of(x, self._inputs, self._bias)
        out = torch.empty(rows.shape[0], self._outputs, dtype=x.dtype)
        _library.srv_scaled_linear(
            TYPES[x.dtype],
            out.data_ptr(),
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            rows.shape[0],
            self._inputs,
            self._outputs,
            rows.stride(0),
        )
        return out


class ByteLinear:
    """The product with a weight of 8-bit integers [outputs, inputs]: x [T, inputs] -> [T, outputs] of x's dtype.

    scales: float32 [outputs]. `static`: (1 / input_scale, input_offset), and `counted` int32 [outputs] is added to sums
    of steps; without it each row is rounded by its own largest magnitude. bias: [outputs] of x's dtype, added last.
    The weight is packed, that is copied, once; afterwards only the copy is used.
    """

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        counted: Tensor | None = None,
        static: tuple[float, float] = (0.0, 0.0),
        room: Room | None = None,
    ) -> None:
        rows = _rows(weight)
        self._outputs, self._inputs = rows.shape
        _check_outputs(self._outputs, scales=scales, bias=bias, counted=counted)
        self._packed = _memory(_library.srv_packed_bytes(self._outputs, self._inputs), room)
        _library.srv_pack_bytes(self._packed.data_ptr(), rows.data_ptr(), self._outputs, self._inputs, rows.stride(0))
        correction = -128 * weight.sum(1, dtype=torch.int32)
        self._correction = correction if counted is None else correction + counted.int()
        self._scales, self._bias, self._static = scales.float().contiguous(), bias, static

    def __call__(self, x: Tensor) -> Tensor:
        rows = _rows_of(x, self._inputs, self._bias)
        count = rows.shape[0]
        out = torch.empty(count, self._outputs, dtype=x.dtype)
        args = ByteLinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._correction.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            *_OWN[:2],
            count,
            self._inputs,
            self._outputs,
            rows.stride(0),
            *self._static,
        )
        _library.srv_byte_linear(TYPES[x.dtype], byref(args))
        return out


# The types of GGUF files whose blocks are multiplied as they are, by their numbers there.
STORED = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
}
_STRETCH = 32  # inputs that lie together in packed blocks


class BlockWeight:
    """A weight [outputs, inputs] in the blocks of a GGUF file, repacked once.

    rows: uint8 [outputs, bytes of a row], as the file has them. `stored`: the type's name, one of `STORED`.
    """

    def __init__(self, rows: Tensor, stored: str, inputs: int, room: Room | None = None) -> None:
        self.outputs, self.inputs = rows.shape[0], inputs
        self._stored = STORED[stored]
        if inputs % _STRETCH or rows.shape[1] != _library.srv_stored_row_bytes(self._stored, inputs):
            raise ValueError(f"{inputs} weights of type {stored} do not lie in {rows.shape[1]} bytes")
        rows = _rows(rows)
        self._packed = _memory(_library.srv_packed_blocks(self._stored, self.outputs, inputs), room)
        _library.srv_pack_blocks(
            self._stored, self._packed.data_ptr(), rows.data_ptr(), self.outputs, inputs, rows.stride(0)
        )

    @property
    def bytes(self) -> int:
        """What a product reads of it."""
        return self._packed.nbytes

    def linear(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, inputs] -> [T, outputs] of x's dtype.

        Every 16 inputs of a row are rounded to steps of 1/127 of their largest, rounded up to a multiple of the row's
        unit, which is 1/17,045 of the row's largest step or less, and 2^-120 at least. With AVX2 and without AVX-512,
        Q5_0, Q8_0 and Q6_K take steps of 1/32,767 of the row's largest, 2^-120 at least. bias: [outputs] of x's
        dtype. `out`: where the result goes, its rows' elements beside one another.
        """
        rows = _rows_of(x, self.inputs, bias)
        count = rows.shape[0]
        out = torch.empty(count, self.outputs, dtype=x.dtype) if out is None else out
        args = BlockLinearArgs(
            rows.data_ptr(),
            self._packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *_OWN,
            count,
            self.inputs,
            self.outputs,
            rows.stride(0),
            out.stride(0),
            self._stored,
        )
        _library.srv_block_linear(TYPES[x.dtype], byref(args))
        return out

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """indices int64 [T], each below `outputs` (not checked) -> [T, inputs]: rows as plain numbers."""
        where = indices.contiguous()
        out = torch.empty(where.shape[0], self.inputs, dtype=dtype)
        args = BlockRowsArgs(
            self._packed.data_ptr(), where.data_ptr(), out.data_ptr(), where.shape[0], self.inputs, self._stored
        )
        _library.srv_block_rows(TYPES[dtype], byref(args))
        return out


class BlockProduct:
    """The product with several matrices below one another: x [T, inputs] -> [T, all their outputs] of x's dtype."""

    def __init__(self, weights: Sequence[BlockWeight], bias: Tensor | None = None) -> None:
        self._weights, self._outputs = tuple(weights), sum(each.outputs for each in weights)
        parts = [None] * len(weights) if bias is None else torch.split(bias, [each.outputs for each in weights])
        self._biases = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._weights) == 1:
            return self._weights[0].linear(x, self._biases[0])
        out = torch.empty(x.shape[0], self._outputs, dtype=x.dtype)
        at = 0
        for weight, bias in zip(self._weights, self._biases, strict=True):
            weight.linear(x, bias, out[:, at : at + weight.outputs])
            at += weight.outputs
        return out


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """As the contract has it. Packs the weight at every call: layers keep a `ByteLinear`."""
    return ByteLinear(weight, weight_scale, bias)(x)


def linear_w8a8_static(
    x: Tensor, weight: Tensor, input_scale: Tensor, input_offset: Tensor, quant_bias: Tensor, deq_scale: Tensor
) -> Tensor:
    """As the contract has it. Packs the weight at every call: layers keep a `ByteLinear`."""
    static = (1.0 / float(input_scale), float(input_offset))
    return ByteLinear(weight, deq_scale, counted=quant_bias, static=static)(x)


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """As the contract has it. Packs the weight at every call: layers keep a `ScaledLinear`."""
    return ScaledLinear(weight, weight_scale, bias)(x)


def linear_gguf(x: Tensor, rows: Tensor, stored: str) -> Tensor:
    """As the contract has it. Packs the weight at every call: layers keep a `BlockWeight`."""
    return _packed(rows, stored).linear(x)


def rows_gguf(rows: Tensor, stored: str, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """As the contract has it. Packs the weight at every call: layers keep a `BlockWeight`."""
    return _packed(rows, stored).rows(indices, dtype)


def _packed(rows: Tensor, stored: str) -> BlockWeight:
    stretch = _library.srv_stored_row_bytes(STORED[stored], 256)
    return BlockWeight(rows, stored, rows.shape[1] * 256 // stretch)
