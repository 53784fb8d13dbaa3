"""The mathematics of the ops of recurrent layers in float64: see `srv_kernels.oracles`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv_kernels.oracles import float64


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    lens: Sequence[int],
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """Each channel's convolution over time with its own weights, after the inputs that its state has kept."""
    begin, out, states_after = 0, [], []
    taps = float64(weight)
    width = taps.shape[1]
    for slot, length in zip(slots.tolist(), lens, strict=True):
        history = torch.cat((float64(states)[slot], float64(x)[begin : begin + length].T), 1)
        total = (history[:, 1:].unfold(1, width, 1) * taps[:, None]).sum(-1)
        total = total if bias is None else total + float64(bias)[:, None]
        out.append((total / (1 + (-total).exp()) if activation == "silu" else total).T)
        states_after.append(history[:, -width:])
        begin += length
    return torch.cat(out), torch.stack(states_after)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    lens: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464), one token after the other.

    S is exp(decay) S; then S + k (beta (v - kᵀ S)); the result is Sᵀ q. q and k are normalised, q is also scaled.
    """
    group = v.shape[1] // k.shape[1]
    query, key = (
        (wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1)
        for wide in (float64(q), float64(k))
    )
    query, value, factor, rate = query * q.shape[-1] ** -0.5, float64(v), float64(decay).exp(), float64(beta)
    begin, out, states_after = 0, [], []
    for slot, length in zip(slots.tolist(), lens, strict=True):
        state = float64(states)[slot]
        for token in range(begin, begin + length):
            state = state * factor[token, :, None, None]
            missing = rate[token, :, None] * (value[token] - torch.einsum("hkv,hk->hv", state, key[token]))
            state = state + key[token, :, :, None] * missing[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, query[token]))
        states_after.append(state)
        begin += length
    return torch.stack(out), torch.stack(states_after)


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    decay: Tensor,
    step: Tensor | None,
    states: Tensor,
    slots: Tensor,
    lens: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), one token after the other.

    S is exp(decay) S + (step x) bᵀ; the result is S c. Without steps, it is linear attention with a decay.
    """
    group = x.shape[1] // b.shape[1]
    key, query = (float64(tensor).repeat_interleave(group, 1) for tensor in (b, c))
    value, factor = float64(x), float64(decay).exp()
    value = value if step is None else value * float64(step).unsqueeze(-1)
    begin, out, states_after = 0, [], []
    for slot, length in zip(slots.tolist(), lens, strict=True):
        state = float64(states)[slot]
        for token in range(begin, begin + length):
            state = state * factor[token, :, None, None] + value[token].unsqueeze(-1) * key[token].unsqueeze(-2)
            out.append(torch.einsum("hpn,hn->hp", state, query[token]))
        states_after.append(state)
        begin += length
    return torch.stack(out), torch.stack(states_after)


def gated_linear_recurrence(
    x: Tensor, decay: Tensor, states: Tensor, slots: Tensor, lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The state of each channel is exp(decay) times itself, plus x, at one token after the other; it is the result."""
    begin, out, states_after = 0, [], []
    value, factor = float64(x), float64(decay).exp()
    for slot, length in zip(slots.tolist(), lens, strict=True):
        state = float64(states)[slot]
        for token in range(begin, begin + length):
            state = state * factor[token] + value[token]
            out.append(state)
        states_after.append(state)
        begin += length
    return torch.stack(out), torch.stack(states_after)


def selective_scan(
    x: Tensor, b: Tensor, c: Tensor, rates: Tensor, step: Tensor, states: Tensor, slots: Tensor, lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba (Gu and Dao 2023, arXiv:2312.00752), one token after the other.

    The state of a channel is a vector: exp(step rates) times itself, plus step x b. The result is its product with c.
    """
    value, key, query, wide = float64(x) * float64(step), float64(b), float64(c), float64(step)
    begin, out, states_after = 0, [], []
    for slot, length in zip(slots.tolist(), lens, strict=True):
        state = float64(states)[slot]
        for token in range(begin, begin + length):
            factor = (wide[token].unsqueeze(-1) * float64(rates)).exp()
            state = state * factor + torch.outer(value[token], key[token])
            out.append(state @ query[token])
        states_after.append(state)
        begin += length
    return torch.stack(out), torch.stack(states_after)
