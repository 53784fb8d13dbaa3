"""Weights from a GGUF file, mapped into memory and decoded a few rows at a time into the model's dtype.

A target of bytes is given the file's own rows of blocks, for layers that multiply those.

Owns the correspondence of tensor names and the order of the rows. Block formats are decoded by the `gguf`
library. Must not know devices: a target is filled by `copy_`, wherever it lies.

Files of the Llama architecture store each query and key head for interleaved rotation (dimensions 0, 1, 2,
3 … turn in pairs), Hugging Face's for rotation by halves:

    stored:   a0 b0 a1 b1 a2 b2 …          [heads, D/2, 2, in]
    wanted:   a0 a1 a2 … b0 b1 b2 …        [heads, 2, D/2, in]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy
import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.base import Progress
from srv.models.facts import ModelFacts
from srv.models.gguf_config import DIVISORS
from srv.models.gguf_header import GGUFHeader, GGUFTensor, read_header
from srv.models.loaders.filling import Meter, check_names

CHUNK = 1 << 22  # numbers decoded at a time: 16 MiB of float32
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DECODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
PERMUTED = ("LlamaForCausalLM",)
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(facts: ModelFacts, targets: Mapping[str, Tensor], progress: Progress | None = None) -> None:
    """Fill every target from the file of `facts`.

    Raises ModelError: missing_tensors, unexpected_tensors, shape_mismatch, unsupported_quantization, and
    what `read_header` raises.
    """
    header = read_header(Path(facts.path))
    stored = _by_name(header)
    shapes = {name: _shape(tensor, targets.get(name)) for name, tensor in stored.items()}
    check_names(facts.path, targets, shapes)
    _check_types(facts.path, list(stored.values()))
    data = numpy.memmap(facts.path, dtype=numpy.uint8, mode="c")  # read alone; torch wants what it could write
    meter = Meter(sum(tensor.size for tensor in stored.values()), progress)
    in_bytes = any(target.dtype == torch.uint8 for target in targets.values())
    with _one_thread() if in_bytes else nullcontext():
        for name, tensor in stored.items():
            if name in targets:
                _fill(_view(facts, name, targets[name]), tensor, data)
                meter.add(tensor.size, name)


def stored_types(path: Path) -> dict[str, str]:
    """The type of every tensor of a file, by the names of Hugging Face. Raises what `read_header` raises."""
    return {name: tensor.type.name for name, tensor in _by_name(read_header(path)).items()}


def _by_name(header: GGUFHeader) -> dict[str, GGUFTensor]:
    return {hugging_face_name(name): tensor for name, tensor in header.tensors.items() if name != DIVISORS}


def _shape(tensor: GGUFTensor, target: Tensor | None) -> tuple[int, ...]:
    """The shape that its target must have: of numbers, or of rows of bytes."""
    if target is None or target.dtype != torch.uint8:
        return tensor.shape
    return tensor.shape[0], tensor.size // tensor.shape[0]


def hugging_face_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; a name not known comes back as it is."""
    if name in WHOLE:
        return WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in IN_LAYER:
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
    return name


def _check_types(path: str, tensors: list[GGUFTensor]) -> None:
    foreign = sorted({t.type.name for t in tensors if t.type.name not in PLAIN and t.type.name not in DECODED})
    if foreign:
        remedy = f"Use a file of {', '.join((*PLAIN, *DECODED))}"
        raise ModelError("unsupported_quantization", path, f"it has tensors of type {', '.join(foreign)}", remedy)


def _view(facts: ModelFacts, name: str, target: Tensor) -> Tensor:
    """The target in the order of the file's rows."""
    is_query, is_key = ".q_proj." in name, ".k_proj." in name
    if facts.architecture not in PERMUTED or not (is_query or is_key):
        return target
    heads = facts.heads if is_query else facts.kv_heads
    return target.view(heads, 2, target.shape[0] // heads // 2, *target.shape[1:]).transpose(1, 2)


def _fill(view: Tensor, tensor: GGUFTensor, data: numpy.memmap[tuple[int], numpy.dtype[numpy.uint8]]) -> None:
    """Decode the tensor's rows in order and copy them into the view, whose first axes are those rows."""
    stored = data[tensor.offset : tensor.offset + tensor.size]
    for start, end in _chunks(view):
        size = tensor.size // view.shape[0]
        part = view[start:end]
        rows = stored[start * size : end * size]
        numbers = torch.from_numpy(rows) if view.dtype == torch.uint8 else _decode(rows, tensor)
        part.copy_(numbers.reshape(part.shape))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copying bytes takes threads of the host less time than waiting for one another, where others want its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _chunks(view: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of the first axis of some CHUNK numbers each."""
    step = max(1, CHUNK // max(1, math.prod(view.shape[1:])))
    for start in range(0, view.shape[0], step):
        yield start, min(start + step, view.shape[0])


def _decode(stored: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]], tensor: GGUFTensor) -> Tensor:
    """Flat numbers from whole rows of bytes."""
    if tensor.type.name in PLAIN:
        return torch.frombuffer(bytearray(stored.tobytes()), dtype=PLAIN[tensor.type.name])
    from gguf.constants import GGMLQuantizationType  # blocks that stay as they are need no decoder
    from gguf.quants import dequantize

    row = tensor.shape[-1] // tensor.type.elements * tensor.type.size
    numbers = dequantize(stored.reshape(-1, row), GGMLQuantizationType[tensor.type.name])
    return torch.from_numpy(numbers).flatten()
