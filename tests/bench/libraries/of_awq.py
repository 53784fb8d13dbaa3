"""A layer as AutoAWQ packs it, and the configuration that it writes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from case import INPUTS, LAYER, Case, Cases, full_range
from torch import nn


def cases() -> Cases:
    """Its packing and its configuration; the package itself does not import beside today's transformers."""
    root = next(Path(entry) / "awq" for entry in sys.path if (Path(entry) / "awq" / "models").is_dir())
    for name in ("awq", "awq.models", "awq.modules", "awq.modules.linear", "awq.utils", "awq.quantize"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    outputs, group = 32, 32
    weight, scales, zeros = full_range(outputs, group)
    linear = nn.Linear(INPUTS, outputs, bias=False)
    linear.weight.data = weight
    layer = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    tensors = {f"{LAYER}.{name}": getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    dequantized = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).t()
    text = (root / "__init__.py").read_text()
    made_by = f"autoawq {text.split('__version__ = ')[1].split()[0].strip(chr(34))}"
    awq_config = AwqConfig(q_group_size=group, version="GEMM")
    yield "awq of autoawq", Case(made_by, awq_config.to_transformers_dict(), tensors, {LAYER: dequantized})
