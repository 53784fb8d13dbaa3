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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from srv.models.checkpoints.matching import cut
from srv.models.checkpoints.reading import MAPPED, FileBytes, Reading, for_each
from srv.models.checkpoints.row_orders import SizedRules
from srv.models.checkpoints.slices import Slice, Slices, stored_shape
from srv.specs import ModelFacts

_Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"

_Matrix: TypeAlias = "numpy.ndarray[tuple[int, int], numpy.dtype[numpy.uint8]]"
_Rows: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]"

_LOGARITHM = ".A_log"  # files have the negative exponentials
_NORMS = ("q_norm.weight", "k_norm.weight")  # of all heads, or of each
_UP, _KEYS, _VALUES = (f".{name}.weight" for name in ("kv_b_proj", "k_b_proj", "v_b_proj"))
CHUNK = 1 << 22  # elements dequantized at a time: 16 MiB of float32
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DEQUANTIZED = OP_TYPES


def load_gguf(
    facts: ModelFacts,
    layout: GGUFLayout,
    rules: SizedRules,
    weight_views: Mapping[str, Tensor],
    progress: Progress | None = None,
    slices: Slices = NO_SLICES,
    reading: Reading = MAPPED,
) -> None:
    """Fill every tensor from the file of `facts`, which has the layout of its architecture.

    `rules`: those of the layout with the sizes of the model. `slices`: the parts of stored tensors that belong to this
    rank. Those of bytes are in bytes along the row, and begin and end at the borders of quantization blocks; those of
    query and key rows are whole heads. Raises ModelError: missing_tensors, unexpected_tensors, shape_mismatch,
    unsupported_quantization, damaged (a scale is not a finite number), and those of `read_header`.
    """
    header = read_header(Path(facts.path))
    stored = weights_by_name(header, rules)
    weight_views, slices = _with_latent_parts(weight_views, slices, stored)
    shapes = {name: _shape(tensor, weight_views.get(name), slices.get(name)) for name, tensor in stored.items()}
    check_names(facts.path, weight_views, shapes, slices=slices)
    _check_types(facts.path, list(stored.values()))
    meter = Meter(sum(tensor.size for tensor in stored.values()), progress)
    # On a busy host, waiting for other threads takes longer than copying bytes.
    copies_bytes = any(view.dtype == torch.uint8 for view in weight_views.values())
    with ExitStack() as stack:
        stack.enter_context(own_threads(reading.threads, one=copies_bytes))
        data = _contents(header.paths, reading, stack)

        def load(name: str) -> None:
            view, tensor = weight_views[name], stored[name]
            view = view.flatten() if name.endswith(_NORMS) else view
            rows = _order(name, tensor, view.shape[0] if slices.get(name) is None else shapes[name][0], rules)
            if not _fill(view, tensor, data(tensor), slices.get(name), rows, _change(name, layout)):
                raise ModelError("damaged", facts.path, f"a scale in {name} is not a finite number", DOWNLOAD_AGAIN)
            meter.add(tensor.size, name)

        for_each([name for name in stored if name in weight_views], load, reading.threads)


def _with_latent_parts(
    weight_views: Mapping[str, Tensor], slices: Slices, stored: Mapping[str, GGUFTensor]
) -> tuple[Mapping[str, Tensor], Slices]:
    """The tensors to fill, with those of keys and values in place of the up-projection of latent attention.

    Files have them as two tensors, [heads, latent, key] and [heads, value, latent]; older ones as the one of the model.
    """
    views, parts = dict(weight_views), dict(slices)
    for name in [name for name in views if name.endswith(_UP) and name not in stored]:
        keys, values = name.replace(_UP, _KEYS), name.replace(_UP, _VALUES)
        if keys not in stored or values not in stored or len(stored[keys].shape) != 3:
            continue
        heads, latent, key_dim = stored[keys].shape
        view, part = views[name], parts.pop(name, None)
        rows = (view.shape[0] if part is None else part.total) // heads
        if rows * heads != (view.shape[0] if part is None else part.total) or view.shape[1] != latent:
            continue  # the loader reports that the tensor is missing
        per_head = views.pop(name).view(-1, rows, latent)
        views[keys], views[values] = per_head[:, :key_dim].transpose(1, 2), per_head[:, key_dim:]
        if part is not None:
            parts |= dict.fromkeys((keys, values), part.scaled(1, rows))
    return views, parts


def _order(name: str, tensor: GGUFTensor, outputs: int, rules: SizedRules) -> _Rows | None:
    """Which rows of the stored tensor come first, second and so on; None if their order is that of the layer."""
    layer = name.rpartition(".")[0]
    order = rules.order(layer, outputs) or rules.order(name, outputs)
    rows: _Rows | None = None if tensor.rows is None else numpy.array(tensor.rows)
    if order is None:
        return rows
    period = numpy.array(order.period)
    begins = numpy.arange(outputs // len(period)) * len(period)
    ordered: _Rows = (begins[:, None] + period).ravel()
    return ordered if rows is None else rows.take(ordered)


def _change(name: str, layout: GGUFLayout) -> Callable[[Tensor], Tensor] | None:
    """What makes the values of a tensor from those that are stored; None if they are the same."""
    if name.endswith(_LOGARITHM):
        return lambda values: values.float().neg().log()
    offset = layout.stored_offset(name)
    return (lambda values: values.float() - offset) if offset else None


def _contents(paths: Sequence[Path], reading: Reading, stack: ExitStack) -> Callable[[GGUFTensor], _Bytes]:
    """The stored bytes of a tensor, as long as the stack is open."""
    if not reading.mapped:
        files = [stack.enter_context(FileBytes(path)) for path in paths]
        return lambda tensor: numpy.frombuffer(
            files[tensor.file].read(tensor.offset, _extent(tensor)), dtype=numpy.uint8
        )
    # A mapping is only read, but torch warns about arrays that are not writable; "c" is copy-on-write.
    mapped = [numpy.memmap(path, dtype=numpy.uint8, mode="c") for path in paths]
    return lambda tensor: mapped[tensor.file][tensor.offset : tensor.offset + _extent(tensor)]


def _extent(tensor: GGUFTensor) -> int:
    """The bytes from the beginning of a tensor to the end of its last row."""
    if tensor.rows is None:
        return tensor.size
    return tensor.size // len(tensor.rows) * (max(tensor.rows) + 1)


def _shape(tensor: GGUFTensor, view: Tensor | None, part: Slice | None) -> tuple[int, ...]:
    """The shape that the model's whole tensor must have: of elements, or of rows of bytes. `part`: what `view` has.

    Files omit axes of size 1, or have them where the model does not, and divide the axis of a norm of several groups.
    """
    if view is None or view.dtype != torch.uint8:
        shape = None if view is None else stored_shape(view.shape, part)
        squeezed = shape is not None and _without_ones(shape) == _without_ones(tensor.shape)
        flattened = shape is not None and shape == (math.prod(tensor.shape),)
        return shape if shape is not None and (squeezed or flattened) else tensor.shape
    return tensor.shape[0], tensor.size // tensor.shape[0]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _check_types(path: str, tensors: list[GGUFTensor]) -> None:
    supported = (*UNQUANTIZED, *DEQUANTIZED)
    unsupported = sorted({tensor.type.name for tensor in tensors if tensor.type.name not in supported})
    if unsupported:
        remedy = f"Use a file of {', '.join(supported)}"
        raise ModelError("unsupported_quantization", path, f"it has tensors of type {', '.join(unsupported)}", remedy)


def _fill(
    view: Tensor,
    tensor: GGUFTensor,
    stored: _Bytes,
    part: Slice | None,
    order: _Rows | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
) -> bool:
    """Dequantize the stored rows in order and copy them into the view, whose first axes are the same rows.

    `order`: the stored row of each row of the whole model. `change`: of dequantized values, before they are rounded to
    the view's dtype. False, and the rest is not copied, if a scale is not a finite number.
    """
    rows_of_rank, columns = (part, None) if part is not None and part.axis == 0 else (None, part)
    size = tensor.size // (view.shape[0] if rows_of_rank is None else rows_of_rank.total)
    whole = stored.reshape(-1, size)
    if rows_of_rank is not None:
        whole, order = _of_rank(rows_of_rank, whole, order)
    for start, end in _chunks(view):
        chunk = view[start:end]
        rows = (whole[start:end] if order is None else whole[order[start:end]]).reshape(-1)
        if not finite_scales(rows, tensor.type):
            return False
        values = torch.from_numpy(rows) if view.dtype == torch.uint8 else _dequantize(rows, tensor)
        if columns is not None:
            values = cut(values.view(-1, columns.total), columns)
        if change is not None:
            values = change(values)
        chunk.copy_(values.reshape(chunk.shape))
    return True


def _of_rank(part: Slice, rows: _Matrix, order: _Rows | None) -> tuple[_Matrix, _Rows | None]:
    """Stored rows that contain those of a slice, and which of them are the first one of the slice, the second, and so
    on; None for all of them. `order`: as in `_fill`."""
    if order is None and not part.others:
        return rows[part.begin : part.end], None
    held = numpy.concatenate([numpy.arange(begin, end) for begin, end in part.ranges])
    return rows, held if order is None else order[held]


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
