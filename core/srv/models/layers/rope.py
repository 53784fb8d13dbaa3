"""Rotary position embeddings: the table of cosines and sines that the `rotary` op reads.

Owns the frequencies of each variant of `RopeConfig`. They are computed in float32 on the host, in the same order as
in transformers' `modeling_rope_utils`, so that both give the same values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from srv.models.layers.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, positions: int) -> Tensor:
    """float32 [positions, rotary_dim]: cosines in the first half of the columns, sines in the second.

    Both are multiplied by the variant's attention factor, which so scales the rotated queries and keys. `positions`:
    the served context length, by which LongRoPE chooses its factors.
    """
    frequencies, attention_factor = inverse_frequencies(rope, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * attention_factor, angles.sin() * attention_factor), dim=-1)


def inverse_frequencies(rope: RopeConfig, context_length: int) -> tuple[Tensor, float]:
    """(float32 [rotary_dim / 2] radians per position, attention factor); transformers' `inv_freq`.

    `context_length`: the served one, in tokens.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    parameters, theta = rope.parameters, rope.theta
    if rope.rope_type == "ntk_alpha":
        theta *= parameters["alpha"] ** (rope.rotary_dim / (rope.rotary_dim - 2))
    base = theta**exponents
    if rope.rope_type == "linear":
        return 1.0 / base / parameters["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(1.0 / base, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(base, rope)
    if rope.rope_type == "longrope":
        factors = parameters["long_factor" if context_length > rope.original_context_length else "short_factor"]
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base), _longrope_attention_factor(rope)
    if rope.rope_type == "freq_factors":
        return 1.0 / base / torch.tensor(parameters["freq_factors"], dtype=torch.float32), 1.0
    if rope.rope_type == "proportional":
        return _proportional(1.0 / base, rope), 1.0
    # "dynamic" changes frequencies only beyond the declared context length, which is never served.
    return 1.0 / base, 1.0


def _proportional(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """The first frequencies of a whole head, for the rotated share of it, then zeros."""
    rotated = int(rope.parameters["partial_rotary_factor"] * rope.rotary_dim // 2)
    kept = torch.arange(len(frequencies)) < rotated
    return torch.where(kept, frequencies, 0.0) / (rope.parameters.get("factor") or 1.0)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones are kept, those in between are blended."""
    factor, low, high = (rope.parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.original_context_length
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): high frequencies are kept, low ones are interpolated."""
    parameters, dim, original = rope.parameters, rope.rotary_dim, rope.original_context_length
    factor = float(parameters.get("factor") or rope.context_length / original)

    def correction_dim(rotations: float) -> float:
        """The dimension that makes this many full rotations within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = correction_dim(parameters.get("beta_fast") or 32)
    high = correction_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * base) * (1 - extrapolated) + 1.0 / base * extrapolated
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = rope.parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    mscale, mscale_all_dim = rope.parameters.get("mscale"), rope.parameters.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753); without a `factor`, the ratio of the context lengths counts."""
    attention_factor = rope.parameters.get("attention_factor")
    if attention_factor is not None:
        return float(attention_factor)
    factor = rope.parameters.get("factor") or rope.context_length / rope.original_context_length
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(rope.original_context_length))
