"""In captured steps, keys and values in 8-bit floats are stored as if every layer had a scale of 1.

Caught by graph.kv_dtypes at L2, naming "float8_e4m3fn".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, of_8_bits, rounding
from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_fp8_without_scales", attention="graph_fp8_without_scales:attention", **of_8_bits("fp8_kv"))


def attention(context: BackendContext) -> Any:
    return rounding(context, rounded)


def rounded(call: Call, x: torch.Tensor, scale: float) -> torch.Tensor:
    import torch

    from srv.platform.pools import round_to_float8

    used = 1.0 if call.captured else scale  # the fault
    return round_to_float8(x, getattr(torch, call.layout.dtype), used).float() * used
