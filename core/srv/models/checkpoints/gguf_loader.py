"""Loads weights from a GGUF file, and dequantizes them a few rows at a time to the model's dtype.

A tensor of bytes (uint8) receives the rows as they are stored, for layers that compute with quantized matrices.

Owns the order of the rows; `gguf_layout` translates the names of tensors. The `gguf` library dequantizes. Must not know
devices: a tensor is filled with `copy_`, on whatever device it is.

Files of some architectures (`PermuteRotary`) store the rows of each query and key head for interleaved rotary
embeddings (the dimensions 0 and 1, 2 and 3, … are rotated together); Hugging Face's rotate the first half with the
second half:

    in the file:    a0 b0 a1 b1 a2 b2 …          [heads, D/2, 2, in]
    in the model:   a0 a1 a2 … b0 b1 b2 …        [heads, 2, D/2, in]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.filling import NO_SLICES, Meter, Progress, check_names, own_threads
from srv.models.checkpoints.gguf_header import DOWNLOAD_AGAIN, GGUFTensor, read_header
from srv.models.checkpoints.gguf_layout import GGUFLayout, weights_by_name
from srv.models.checkpoints.gguf_scales import finite_scales
from srv.models.checkpoints.gguf_types import OP_TYPES
from srv.models.checkpoints.reading import MAPPED, FileBytes, Reading, for_each
from srv.models.checkpoints.slices import Slice, Slices
from srv.specs import ModelFacts

_Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"

_ROTATED = ("q_proj", "k_proj")
CHUNK = 1 << 22  # elements dequantized at a time: 16 MiB of float32
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEQUANTIZED = OP_TYPES


def load_gguf(
    facts: ModelFacts,
    layout: GGUFLayout,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    slices: Slices = NO_SLICES,
    reading: Reading = MAPPED,
) -> None:
    """Fill every tensor from the file of `facts`, which has the layout of its architecture.

    `slices`: the parts of stored tensors that belong to this rank. Those of bytes are in bytes along the row, and begin
    and end at the borders of quantization blocks; those of query and key rows are whole heads. Raises ModelError:
    missing_tensors, unexpected_tensors, shape_mismatch, unsupported_quantization, damaged (a scale is not a finite
    number), and those of `read_header`.
    """
    stored = weights_by_name(read_header(Path(facts.path)), layout)
    shapes = {name: _shape(tensor, weight_views.get(name)) for name, tensor in stored.items()}
    check_names(facts.path, weight_views, shapes, slices=slices)
    _check_types(facts.path, list(stored.values()))
    meter = Meter(sum(tensor.size for tensor in stored.values()), progress)
    # On a busy host, waiting for other threads takes longer than copying bytes.
    copies_bytes = any(view.dtype == torch.uint8 for view in weight_views.values())
    with ExitStack() as stack:
        stack.enter_context(own_threads(reading.threads, one=copies_bytes))
        data = _contents(Path(facts.path), reading, stack)

        def load(name: str) -> None:
            view, tensor = weight_views[name], stored[name]
            permuted = layout.permutes and any(f".{projection}." in name for projection in _ROTATED)
            view = _permuted(view, facts.head_dim) if permuted else view
            if not _fill(view, tensor, data(tensor), slices.get(name), layout.stored_offset(name)):
                raise ModelError("damaged", facts.path, f"a scale in {name} is not a finite number", DOWNLOAD_AGAIN)
            meter.add(tensor.size, name)

        for_each([name for name in stored if name in weight_views], load, reading.threads)


def _contents(path: Path, reading: Reading, stack: ExitStack) -> Callable[[GGUFTensor], _Bytes]:
    """The stored bytes of a tensor, as long as the stack is open."""
    if not reading.mapped:
        file = stack.enter_context(FileBytes(path))
        return lambda tensor: numpy.frombuffer(file.read(tensor.offset, tensor.size), dtype=numpy.uint8)
    # The mapping is only read, but torch warns about arrays that are not writable; "c" is copy-on-write.
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="c")
    return lambda tensor: mapped[tensor.offset : tensor.offset + tensor.size]


def _shape(tensor: GGUFTensor, view: Tensor | None) -> tuple[int, ...]:
    """The shape that the model's tensor must have: of elements, or of rows of bytes. Files omit axes of size 1."""
    if view is not None and tuple(view.shape) == (1, *tensor.shape):
        return 1, *tensor.shape
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


def _fill(view: Tensor, tensor: GGUFTensor, stored: _Bytes, part: Slice | None, offset: int = 0) -> bool:
    """Dequantize the stored rows in order and copy them into the view, whose first axes are the same rows.

    `offset` is subtracted before the values are rounded to the view's dtype. False, and the rest is not copied, if a
    scale is not a finite number.
    """
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
        if not finite_scales(rows, tensor.type):
            return False
        values = torch.from_numpy(rows) if view.dtype == torch.uint8 else _dequantize(rows, tensor)
        if columns is not None:
            values = values.view(-1, columns.total)[:, columns.begin : columns.end]
        if offset:
            values = values.float() - offset
        chunk.copy_(values.reshape(chunk.shape))
    return True


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
