"""Copies of whole pages between the tensors of two KV pools, whatever they hold: a copy of bytes."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from srv_kernels.triton.numerics import store
from srv_kernels.triton.registration import triton_op
from srv_kernels.triton.variants import Variant

_BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # widest first


@triton.jit
def _copy_pages(source, target, pages, words, BLOCK: tl.constexpr):
    """One program per pair of pages and BLOCK words of a page."""
    pair = tl.program_id(0).to(tl.int64) * 2
    read = tl.load(pages + pair).to(tl.int64) * words
    written = tl.load(pages + pair + 1).to(tl.int64) * words
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = word < words
    store(target + written + word, tl.load(source + read + word, mask=mask), mask)


@triton_op("copy_pages(Tensor source, Tensor(a!) target, Tensor pages) -> ()")
def copy_pages(source: Tensor, target: Tensor, pages: Tensor) -> None:
    """Copy pages from `source` to `target`, contiguous tensors [pages + 1, ...] of one dtype and page shape.

    pages: integers [N, 2], each a page to read and one to write. No page may be written twice, nor, if source and
    target are one tensor, read and written. ValueError for tensors whose pages differ.
    """
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"copy_pages: pages of {source.dtype} {tuple(source.shape[1:])} do not fit among pages of "
            f"{target.dtype} {tuple(target.shape[1:])}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("copy_pages takes contiguous tensors")
    if not pages.numel():
        return
    page_bytes = source[0].numel() * source.element_size()
    word = next(word for word in _WORDS if page_bytes % word.itemsize == 0)
    words = page_bytes // word.itemsize
    read, written = (x.view(-1).view(torch.uint8).view(word) for x in (source, target))
    _copy_pages[(pages.shape[0], triton.cdiv(words, _BLOCK))](read, written, pages.contiguous(), words, BLOCK=_BLOCK)


VARIANTS = tuple(
    Variant(
        _copy_pages,
        {"source": f"*{word}", "target": f"*{word}", "pages": "*i64", "words": "i32"},
        {"BLOCK": _BLOCK},
        aligned=("words",),
    )
    for word in ("i64", "i32", "i16", "u8")
)
