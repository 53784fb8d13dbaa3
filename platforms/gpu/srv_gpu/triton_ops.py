"""The operators `torch.ops.srv_triton.*`, with the signatures of `srv_kernels.contracts`. Imports Triton.

`load` must have been called before the first of them is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import srv_kernels.triton.activations
import srv_kernels.triton.attention
import srv_kernels.triton.dense_linear
import srv_kernels.triton.fp8_linear
import srv_kernels.triton.fp8_products
import srv_kernels.triton.gguf_linear
import srv_kernels.triton.int8_linear
import srv_kernels.triton.kv_write
import srv_kernels.triton.kv_write_int8
import srv_kernels.triton.latent_attention
import srv_kernels.triton.latent_prefill
import srv_kernels.triton.moe
import srv_kernels.triton.norms
import srv_kernels.triton.page_copies
import srv_kernels.triton.rotary
import srv_kernels.triton.sampling  # noqa: F401  each import registers operators
from srv_gpu.accelerator import Accelerator


def load(accelerator: Accelerator) -> None:
    """Make the operators work on the accelerator's tensors."""
    accelerator.register_triton()


def _operator(name: str) -> Callable[..., Any]:
    operator: Callable[..., Any] = getattr(torch.ops.srv_triton, name).default
    return operator


rms_norm = _operator("rms_norm")
paged_latent = _operator("paged_latent")
latent_prefill = _operator("latent_prefill")
add_rms_norm = _operator("add_rms_norm")
rotary = _operator("rotary")
silu_and_mul = _operator("silu_and_mul")
gelu_tanh_and_mul = _operator("gelu_tanh_and_mul")
linear_w8a8 = _operator("linear_w8a8")
linear_w8a8_static = _operator("linear_w8a8_static")
linear_int8 = _operator("linear_int8")
linear_fp8 = _operator("linear_fp8")
linear_fp8_quantized = _operator("linear_fp8_quantized")
linear_float32 = _operator("linear_float32")
linear_gguf = _operator("linear_gguf")
linear_gguf_float32 = _operator("linear_gguf_float32")
rows_gguf = _operator("rows_gguf")
route_experts = _operator("route_experts")
experts = _operator("experts")
experts_int8 = _operator("experts_int8")
experts_fp8 = _operator("experts_fp8")
experts_gguf = _operator("experts_gguf")
write_kv = _operator("write_kv")
write_kv_int8 = _operator("write_kv_int8")
copy_pages = _operator("copy_pages")
paged_decode = _operator("paged_decode")
paged_extend = _operator("paged_extend")
draw = _operator("draw")
most_likely = _operator("most_likely")
