"""Rotary position embeddings: the table of cosines and sines that the `rotary` op reads.

Owns the frequencies of each variant of `RopeConfig`. Computed in float32 on the host, in the order of
transformers' `modeling_rope_utils`, so that both give the same numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from srv.models.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, positions: int) -> Tensor:
    """float32 [positions, dim]: cosines in the first half of the columns, sines in the second.

    The variant's attention factor multiplies both, hence the rotated queries and keys.
    """
    frequencies, factor = frequencies_of(rope)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def frequencies_of(rope: RopeConfig) -> tuple[Tensor, float]:
    """(float32 [dim / 2] radians a position, attention factor)."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    base = rope.theta**exponents
    parameters = rope.parameters
    if rope.kind == "linear":
        return 1.0 / base / parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope)
    if rope.kind == "longrope":
        return 1.0 / (_vector(parameters["short_factor"], rope) * base), _longrope_factor(rope)
    if rope.kind == "divisors":
        return 1.0 / base / _vector(parameters["divisors"], rope), 1.0
    # "dynamic" changes frequencies only beyond the declared context, which is never served.
    return 1.0 / base, 1.0


def _vector(values: list[float], rope: RopeConfig) -> Tensor:
    vector = torch.tensor(values, dtype=torch.float32)
    if vector.shape != (rope.dim // 2,):
        raise ValueError(f"RoPE {rope.kind} brings {vector.numel()} factors for {rope.dim // 2} frequencies")
    return vector


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor, low, high = (rope.parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original / wavelengths - low) / (high - low)
    between = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > rope.original / low, frequencies / factor, between)
    return torch.where(wavelengths < rope.original / high, frequencies, scaled)


def _yarn(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): dimensions that turn often are kept, slow ones interpolated."""
    parameters = rope.parameters
    factor = float(parameters.get("factor") or rope.context / rope.original)

    def turning(times: float) -> float:
        """The dimension that turns `times` times within the original context."""
        return rope.dim * math.log(rope.original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turning(parameters.get("beta_fast") or 32), turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (factor * base) * (1 - kept) + 1.0 / base * kept, _yarn_factor(rope, factor)


def _yarn_factor(rope: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    one, all_dims = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    return mscale(one) / mscale(all_dims) if one and all_dims else mscale(1.0)


def _longrope_factor(rope: RopeConfig) -> float:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753); the ratio of contexts where no factor is given."""
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = rope.parameters.get("factor") or rope.context / rope.original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(rope.original))
