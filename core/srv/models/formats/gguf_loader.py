"""Loads weights from a GGUF file, which is memory-mapped and dequantized a few rows at a time to the model's dtype.

A tensor of bytes (uint8) receives the rows as they are stored, for layers that compute with quantized matrices.

Owns the order of the rows; `gguf_layout` translates the names of tensors. The `gguf` library dequantizes. Must not know
devices: a tensor is filled with `copy_`, on whatever device it is.

Files of some architectures (`GGUFLayout.permuted`) store the rows of each query and key head for interleaved rotary
embeddings (the dimensions 0 and 1, 2 and 3, … are rotated together); Hugging Face's rotate the first half with the
second half:

    in the file:    a0 b0 a1 b1 a2 b2 …          [heads, D/2, 2, in]
    in the model:   a0 a1 a2 … b0 b1 b2 …        [heads, 2, D/2, in]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.formats.filling import NO_SLICES, Meter, Progress, check_names
from srv.models.formats.gguf_header import ROPE_FREQ_FACTORS, GGUFHeader, GGUFTensor, read_header
from srv.models.formats.gguf_layout import GGUFLayout
from srv.models.formats.slices import Slice, Slices
from srv.specs import ModelFacts

_Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"

CHUNK = 1 << 22  # elements dequantized at a time: 16 MiB of float32
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEQUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def load_gguf(
    facts: ModelFacts,
    layout: GGUFLayout,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    slices: Slices = NO_SLICES,
) -> None:
    """Fill every tensor from the file of `facts`, which has the layout of its architecture.

    `slices`: the parts of stored tensors that belong to this rank. Those of bytes are in bytes along the row, and begin
    and end at the borders of quantization blocks; those of query and key rows are whole heads. Raises ModelError:
    missing_tensors, unexpected_tensors, shape_mismatch, unsupported_quantization, and those of `read_header`.
    """
    header = read_header(Path(facts.path))
    stored = _by_name(header, layout)
    shapes = {name: _shape(tensor, weight_views.get(name)) for name, tensor in stored.items()}
    check_names(facts.path, weight_views, shapes, slices=slices)
    _check_types(facts.path, list(stored.values()))
    # The mapping is only read, but torch warns about arrays that are not writable; "c" is copy-on-write.
    data = numpy.memmap(facts.path, dtype=numpy.uint8, mode="c")
    meter = Meter(sum(tensor.size for tensor in stored.values()), progress)
    copies_bytes = any(view.dtype == torch.uint8 for view in weight_views.values())
    with _one_thread() if copies_bytes else nullcontext():
        for name, tensor in stored.items():
            if name in weight_views:
                view = weight_views[name]
                view = _permuted(view, facts.head_dim) if layout.is_permuted(name) else view
                _fill(view, tensor, data, slices.get(name), layout.stored_offset(name))
                meter.add(tensor.size, name)


def tensor_types(path: Path, layout: GGUFLayout) -> dict[str, str]:
    """The type of every tensor of a file, by its Hugging Face name. Raises ModelError as `read_header` does."""
    return {name: tensor.type.name for name, tensor in _by_name(read_header(path), layout).items()}


def _by_name(header: GGUFHeader, layout: GGUFLayout) -> dict[str, GGUFTensor]:
    tensors = header.tensors.items()
    return {layout.hugging_face_name(name): tensor for name, tensor in tensors if name != ROPE_FREQ_FACTORS}


def _shape(tensor: GGUFTensor, view: Tensor | None) -> tuple[int, ...]:
    """The shape that the model's tensor must have: of elements, or of rows of bytes."""
    if view is None or view.dtype != torch.uint8:
        return tensor.shape
    return tensor.shape[0], tensor.size // tensor.shape[0]


def _check_types(path: str, tensors: list[GGUFTensor]) -> None:
    supported = (*UNQUANTIZED, *DEQUANTIZED)
    unsupported = sorted({tensor.type.name for tensor in tensors if tensor.type.name not in supported})
    if unsupported:
        remedy = f"Use a file of {', '.join(supported)}"
        raise ModelError("unsupported_quantization", path, f"it has tensors of type {', '.join(unsupported)}", remedy)


def _permuted(view: Tensor, head_dim: int) -> Tensor:
    """The model's tensor with its rows in the order of the file."""
    return view.view(-1, 2, head_dim // 2, *view.shape[1:]).transpose(1, 2)


def _fill(view: Tensor, tensor: GGUFTensor, data: _Bytes, part: Slice | None, offset: int = 0) -> None:
    """Dequantize the stored rows in order and copy them into the view, whose first axes are the same rows.

    `offset` is subtracted before the values are rounded to the view's dtype.
    """
    stored = data[tensor.offset : tensor.offset + tensor.size]
    columns = None
    if part is not None and part.axis == 0:
        row = tensor.size // part.total
        stored = stored[part.begin * row : part.end * row]
    elif part is not None:
        columns = part
    size = stored.size // view.shape[0]
    for start, end in _chunks(view):
        chunk = view[start:end]
        rows = stored[start * size : end * size]
        values = torch.from_numpy(rows) if view.dtype == torch.uint8 else _dequantize(rows, tensor)
        if columns is not None:
            values = values.view(-1, columns.total)[:, columns.begin : columns.end]
        if offset:
            values = values.float() - offset
        chunk.copy_(values.reshape(chunk.shape))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: on a busy host, waiting for other threads takes longer than copying the bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _chunks(view: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis of about CHUNK elements each."""
    step = max(1, CHUNK // max(1, math.prod(view.shape[1:])))
    for start in range(0, view.shape[0], step):
        yield start, min(start + step, view.shape[0])


def _dequantize(stored: _Bytes, tensor: GGUFTensor) -> Tensor:
    """Whole rows of stored bytes as a flat tensor of floats."""
    if tensor.type.name in UNQUANTIZED:
        return torch.frombuffer(bytearray(stored.tobytes()), dtype=UNQUANTIZED[tensor.type.name])
    from gguf.constants import GGMLQuantizationType  # imported late: not needed if everything stays quantized
    from gguf.quants import dequantize

    row = tensor.shape[-1] // tensor.type.elements * tensor.type.size
    values = dequantize(stored.reshape(-1, row), GGMLQuantizationType[tensor.type.name])
    return torch.from_numpy(values).flatten()
