"""Keys and values beyond the range of float8_e5m2 become infinite.

Caught by attention.fp8_kv at L2, naming "float8_e5m2".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, of_8_bits, rounding
from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("fp8_kv_infinite", attention="fp8_kv_infinite:attention", **of_8_bits("fp8_kv"))


def attention(context: BackendContext) -> Any:
    return rounding(context, rounded)


def rounded(call: Call, x: torch.Tensor, scale: float) -> torch.Tensor:
    import torch

    from srv.platform.pools import round_to_float8

    stored = round_to_float8(x, getattr(torch, call.layout.dtype), scale).float() * scale
    limit = torch.finfo(torch.float8_e5m2).max * scale
    too_large = (x.float().abs() > limit) & (call.layout.dtype == "float8_e5m2")
    return torch.where(too_large, x.float().sign() * torch.inf, stored)  # the fault
