"""When a GPU quantizes activations to FP8 for products with FP8 weights if the user names none. Torch-free."""

from __future__ import annotations

from srv.args.rules.products import READS, quantizes_inputs
from srv.platform.facts import Default, OpCall, ResolutionContext
from srv_gpu.op_specs import TRITON_FP8, fp8_products


def _products(context: ResolutionContext) -> str | None:
    """Where the checkpoint was made for it, and the GPU has matrix units for it."""
    call = OpCall(context["dtype"], {})
    return TRITON_FP8 if quantizes_inputs(context) and fp8_products(context.device, call) is None else None


FP8_PRODUCTS = Default(
    "fp8_gemm_backend",
    _products,
    "the checkpoint states activations in FP8, and this GPU multiplies FP8 by FP8",
    reads=("dtype", *READS),
)
