"""What the tuner runs on a GPU: launches of typical sizes with given block sizes, and their time.

Sizes are those of Llama 3 8B on one device: prompts of 4,096 tokens, rows of 4,096 tokens to decode, and a projection
of 4,096 x 4,096.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable

import torch

from srv_kernels.triton import attention as paged
from srv_kernels.triton import dense_linear, gguf_linear, int8_linear
from srv_kernels.triton.attention_plan import DecodePlan, Heads
from srv_kernels.triton.attention_tuning import SPLIT_TOKENS, Blocks
from srv_kernels.triton.quantized_tuning import GemmBlocks, GemvBlocks
from srv_kernels.triton.quantized_tuning import target as present_target
from srv_kernels.triton.registration import INTERPRETED
from srv_kernels.triton.targets import Target
from srv_kernels.triton.tune_candidates import Place, Sizes

_PAGE = 16
_HEADS, _KV_HEADS = 32, 8
_QUANT_TYPE = "Q4_K"
_Q4_K_BYTES = 144  # per 256 weights
_MILLISECONDS = 1e-3
# Of x, by tile.
_ROWS = {
    "int8_gemm": (16, 64, 1024),
    "int8_gemm_float32": (16, 1024),
    "dense_gemm": (16, 256),
    "gguf_gemm": (16, 64, 1024),
}


def why_not(target: Target) -> str | None:
    """Why this machine cannot measure for the target; None if it can."""
    if INTERPRETED:
        return "block sizes are measured on a GPU, not in Triton's interpreter: unset TRITON_INTERPRET"
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "cpu":
        return f"there is no GPU here: run this on a machine with a GPU of {target.name}"
    present = present_target()
    return None if present == target.name else f"the GPU of this machine is {present}, not {target.name}: pass --target"


def timer(target: Target) -> Callable[[Place, Sizes], float]:
    """A `srv_kernels.triton.tune.Timer` on the GPU of this machine: the median of repeated launches."""
    from triton.testing import do_bench

    device = torch.accelerator.current_accelerator()
    return lambda place, sizes: do_bench(launch(place, sizes, device), return_mode="median") * _MILLISECONDS


def launch(
    place: Place, sizes: Sizes, device: torch.device, tokens: int = 4096, width: int = 4096
) -> Callable[[], object]:
    """A call that launches the kernel of a place once. tokens: of prompts and of rows to decode. width: of a weight."""
    if place.table == "attention":
        phase, _, dim = str(place.key).partition(" ")
        make = _extend if phase == "extend" else _decode
        return make(Blocks(*sizes), int(dim), device, tokens)
    if place.table == "gguf_gemv":
        return _gguf(1, GemvBlocks(*sizes), device, width)
    tile = GemmBlocks(1 << 62, *sizes)
    rows = _ROWS[place.table][int(place.key)]
    if place.table == "gguf_gemm":
        return _gguf(rows, tile, device, width)
    if place.table == "dense_gemm":
        return _dense(rows, tile, device, width)
    return _int8(rows, tile, device, width, torch.float32 if place.table == "int8_gemm_float32" else torch.bfloat16)


def _pool(rows: int, tokens: int, dim: int, device: torch.device) -> list[torch.Tensor]:
    """Keys, values and a page table of rows of `tokens` tokens."""
    pages = -(-tokens // _PAGE)
    shape = (rows * pages + 1, _PAGE, _KV_HEADS, dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    order = torch.randperm(rows * pages, device=device).int() + 1
    return [keys, values, order.view(rows, pages)]


def _integers(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _extend(sizes: Blocks, dim: int, device: torch.device, tokens: int) -> Callable[[], object]:
    q = torch.randn(tokens, _HEADS, dim, device=device, dtype=torch.bfloat16)
    arguments = [q, *_pool(1, tokens, dim, device), _integers([0, tokens], device), _integers([tokens], device)]
    arguments += [torch.empty_like(q), dim**-0.5, *[None] * 7, list(sizes)]
    return lambda: paged.paged_extend(*arguments)


def _decode(sizes: Blocks, dim: int, device: torch.device, tokens: int) -> Callable[[], object]:
    """Eight rows, each divided as far as the least size of a split allows, up to eight."""
    rows = 8
    splits = max(1, min(8, tokens // SPLIT_TOKENS))
    plan = DecodePlan(1, splits, max(1, SPLIT_TOKENS // sizes.keys), sizes)
    q = torch.randn(rows, _HEADS, dim, device=device, dtype=torch.bfloat16)
    shape = plan.partial_shape(rows, Heads(_HEADS, _KV_HEADS, dim, dim, 2))
    partial = torch.empty(shape, device=device)
    arguments = [q, *_pool(rows, tokens, dim, device), _integers(list(range(rows + 1)), device)]
    arguments += [_integers([tokens] * rows, device), torch.empty_like(q), dim**-0.5, *[None] * 7]
    arguments += [list(sizes), partial, torch.empty(shape[:-1], device=device), [1, splits, plan.least_blocks]]
    return lambda: paged.paged_decode(*arguments)


def _int8(rows: int, tile: GemmBlocks, device: torch.device, width: int, dtype: torch.dtype) -> Callable[[], object]:
    x = torch.randn(rows, width, device=device, dtype=dtype)
    weight = torch.randint(-127, 128, (width, width), device=device, dtype=torch.int8)
    scales, out = torch.rand(width, device=device), torch.empty(rows, width, device=device, dtype=dtype)
    return lambda: int8_linear.multiply(x, weight, out, None, scales, None, None, tile)


def _dense(rows: int, tile: GemmBlocks, device: torch.device, width: int) -> Callable[[], object]:
    x, weight = (torch.randn(count, width, device=device, dtype=torch.bfloat16) for count in (rows, width))
    return lambda: dense_linear.multiply(x, weight, tile)


def _gguf(rows: int, sizes: GemmBlocks | GemvBlocks, device: torch.device, width: int) -> Callable[[], object]:
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    size = width // 256 * _Q4_K_BYTES
    weight = torch.randint(0, 60, (width, size), device=device, dtype=torch.uint8)  # scales that are finite
    return lambda: gguf_linear.multiply(x, weight, _QUANT_TYPE, sizes)
