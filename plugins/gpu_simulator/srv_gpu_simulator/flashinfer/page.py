"""flashinfer.page: writing keys and values into a paged cache, and helpers for its index arrays."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from srv_gpu_simulator.checks import Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.flashinfer.attention import LAYOUTS, unpack_cache
from srv_gpu_simulator.paged_attention import Pages


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The number of tokens of each sequence, [n]."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return (pages - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    accelerator: Accelerator, append_indptr: Tensor, seq_lens: Tensor, nnz: int
) -> tuple[Tensor, Tensor]:
    """(sequence, position) of each appended token, int32 [nnz]; the appended tokens are the last of their sequence."""
    rules = Rules("get_batch_indices_positions")
    rules.on_device(append_indptr=append_indptr, seq_lens=seq_lens)
    rules.int32(append_indptr=append_indptr)
    sequences = torch.empty(nnz, dtype=torch.int32, device=append_indptr.device)
    positions = torch.empty_like(sequences)
    accelerator.launch(
        "flashinfer.get_batch_indices_positions", _positions, append_indptr, seq_lens, sequences, positions
    )
    return sequences, positions


def _positions(indptr: Tensor, lengths: Tensor, sequences: Tensor, positions: Tensor) -> None:
    ends = indptr.tolist()
    for row, (start, end) in enumerate(pairwise(ends)):
        length = int(lengths[row])
        sequences[start:end] = row
        positions[start:end] = torch.arange(length - (end - start), length)


def append_paged_kv_cache(
    accelerator: Accelerator,
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values [n, KV heads, D] into the pages of their sequences, in the dtype of the cache.

    batch_indices, positions: [n], the sequence and position of each. The index arrays include the appended tokens.
    """
    rules = Rules("append_paged_kv_cache")
    rules.require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), "must be 'NHD' or 'HND'", KeyError)
    rules.on_device(append_key=append_key, append_value=append_value, batch_indices=batch_indices, positions=positions)
    rules.on_device(kv_indices=kv_indices, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    key, value = unpack_cache(rules, paged_kv_cache, kv_layout)
    tokens = append_key.shape[0]
    for name, appended, cache in (("append_key", append_key, key), ("append_value", append_value, value)):
        rules.dims(name, appended, 3)
        rules.unit_stride(**{name: appended})
        rules.dtype(name, appended.dtype, (cache.dtype,))
        rules.shape(name, appended, (tokens, *cache.shape[2:]))
    rules.shape("batch_indices", batch_indices, (tokens,))
    rules.shape("positions", positions, (tokens,))
    arrays = [one.int() for one in (batch_indices, positions, kv_indptr, kv_indices, kv_last_page_len)]
    accelerator.launch("flashinfer.append_paged_kv_cache", _append, append_key, append_value, key, value, arrays)


def _append(append_key: Tensor, append_value: Tensor, key: Tensor, value: Tensor, arrays: list[Tensor]) -> None:
    sequences, positions, indptr, indices, last = arrays
    pages = Pages(indptr, indices, last, key.shape[1])
    lengths = pages.lengths()
    for token, (row, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        if not (0 <= row < len(lengths) and 0 <= position < lengths[row]):
            raise RuntimeError(
                f"append_paged_kv_cache: token {token} has position {position} of sequence {row}, which is not within "
                f"the lengths {lengths}"
            )
        page, at = divmod(position, key.shape[1])
        block = int(indices[int(indptr[row]) + page])
        key[block, at], value[block, at] = append_key[token], append_value[token]
