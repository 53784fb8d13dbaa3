"""Plain-torch implementations of the ops of recurrent layers: see `srv_kernels.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    lens: Sequence[int],
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """x [T, C], weight [C, W], bias [C] or None, states [S, C, W], slots int64 [R] -> ([T, C], new states)."""
    width, wide = weight.shape[1], weight.float()
    held = states.index_select(0, slots)
    single = _leading_rows_of_one(lens)
    new = [torch.cat((held[:single, :, 1:], x[:single].to(held.dtype).unsqueeze(2)), 2)]
    total, begin = [(new[0].float() * wide).sum(-1)], single
    for row in range(single, len(lens)):
        end = begin + lens[row]
        history = torch.cat((held[row], x[begin:end].T.to(held.dtype)), 1)
        taps = history[:, 1:].float().unfold(1, width, 1)
        total.append((taps * wide.unsqueeze(1)).sum(-1).T)
        new.append(history[None, :, -width:])
        begin = end
    sums = _joined(total)
    sums = sums if bias is None else sums + bias.float()
    return (F.silu(sums) if activation == "silu" else sums).to(x.dtype), _joined(new)


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
    """q, k [T, H, K], v [T, HV, V], decay, beta float32 [T, HV], states [S, HV, K, V], slots int64 [R] -> (float32
    [T, HV, V], new states float32 [R, HV, K, V]).

    The leading rows of one token are computed together, by the recurrence; the others one by one, in chunks.
    """
    group = v.shape[1] // k.shape[1]
    query, key = _unit_vectors(q) * q.shape[-1] ** -0.5, _unit_vectors(k)
    if group > 1:
        query, key = query.repeat_interleave(group, 1), key.repeat_interleave(group, 1)
    value, held = v.float(), states.index_select(0, slots).float()
    single = _leading_rows_of_one(lens)
    stepped, states_after = _delta_step(*(tensor[:single] for tensor in (query, key, value, decay, beta, held)))
    out, new, begin = [stepped], [states_after], single
    for row in range(single, len(lens)):
        part = slice(begin, begin + lens[row])
        chunks, state = _delta_chunks(query[part], key[part], value[part], decay[part], beta[part], held[row])
        out.append(chunks)
        new.append(state.unsqueeze(0))
        begin = part.stop
    return _joined(out), _joined(new)


def _leading_rows_of_one(lens: Sequence[int]) -> int:
    """How many rows of one token come first: steps list rows that decode before prompts."""
    return next((row for row, length in enumerate(lens) if length != 1), len(lens))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _unit_vectors(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: query, key [R, HV, K], value [R, HV, V], decay, beta [R, HV], state [R, HV, K, V]."""
    state = state * decay.exp()[..., None, None]
    missing = (value - (state * key.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * missing.unsqueeze(-2)
    return (state * query.unsqueeze(-1)).sum(-2), state


_CHUNK = 64  # tokens


def _delta_chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens of one row: query, key [T, HV, K], value [T, HV, V], decay, beta [T, HV], state [HV, K, V].

    Within a chunk, what each token writes follows from a triangular system of the products of keys (the UT transform of
    Yang et al. 2024, arXiv:2406.06484), so that only chunks are computed one after the other.
    """
    out = []
    for begin in range(0, len(query), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        q, k, v = (tensor[part].transpose(0, 1) for tensor in (query, key, value))
        rate, total = beta[part].T.unsqueeze(-1), decay[part].T.cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # of what token j wrote, at token i
        since_begin = total.exp().unsqueeze(-1)
        system = (k * rate) @ k.transpose(-1, -2) * between
        residual = rate * (v - since_begin * (k @ state))
        written = torch.linalg.solve_triangular(system, residual, upper=False, unitriangular=True)
        out.append(since_begin * (q @ state) + (q @ k.transpose(-1, -2) * between) @ written)
        to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * since_begin[:, -1:] + (k * to_end).transpose(-1, -2) @ written
    return torch.cat(out, 1).transpose(0, 1), state


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
    """x [T, H, P], b, c [T, G, N], decay, step float32 [T, H], states [S, H, P, N], slots int64 [R] -> (float32
    [T, H, P], new states float32 [R, H, P, N]).

    The leading rows of one token are computed together, by the recurrence; the others one by one, in chunks.
    """
    heads, groups = x.shape[1], b.shape[1]
    value = x.float() if step is None else x.float() * step.unsqueeze(-1)
    value = value.reshape(-1, groups, heads // groups, x.shape[2])
    rates = decay.reshape(-1, groups, heads // groups)
    key, query = b.float(), c.float()
    held = states.index_select(0, slots).float().view(-1, groups, heads // groups, *states.shape[2:])
    single = _leading_rows_of_one(lens)
    stepped, states_after = _scan_step(*(tensor[:single] for tensor in (value, key, query, rates, held)))
    out, new, begin = [stepped], [states_after], single
    for row in range(single, len(lens)):
        part = slice(begin, begin + lens[row])
        chunks, state = _scan_chunks(value[part], key[part], query[part], rates[part], held[row])
        out.append(chunks)
        new.append(state.unsqueeze(0))
        begin = part.stop
    return _joined(out).flatten(1, 2), _joined(new).flatten(1, 2)


def _scan_step(value: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: value [R, G, H, P], key, query [R, G, N], decay [R, G, H], state [R, G, H, P, N].

    `state` is a copy already, and is overwritten.
    """
    state.mul_(decay.exp()[..., None, None]).addcmul_(value.unsqueeze(-1), key[:, :, None, None])
    return (state @ query[:, :, None, :, None]).squeeze(-1), state


def _scan_chunks(value: Tensor, key: Tensor, query: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one row: value [T, G, H, P], key, query [T, G, N], decay [T, G, H], state [G, H, P, N].

    Within a chunk, the products of keys and queries weight the values, as in attention (Dao and Gu 2024). Decays
    between two tokens are sums of their own: differences of sums since the begin lose what follows a large one.
    """
    out = []
    for begin in range(0, len(value), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        v, rates = value[part].permute(1, 2, 0, 3), decay[part].permute(1, 2, 0)  # [G, H, L, P], [G, H, L]
        k, q = key[part].transpose(0, 1), query[part].transpose(0, 1)  # [G, L, N]
        tokens = v.shape[2]
        between = rates.unsqueeze(-1).expand(*rates.shape, tokens).tril(-1).cumsum(-2)  # of token j's value, at token i
        weights = (q @ k.transpose(-1, -2)).unsqueeze(1) * between.exp().tril()
        since_begin = rates.cumsum(-1).exp().unsqueeze(-1)
        out.append(weights @ v + since_begin * (q.unsqueeze(1) @ state.transpose(-1, -2)))
        to_end = between[..., -1, :].exp().unsqueeze(-1)
        state = state * since_begin[..., -1:, :] + (v * to_end).transpose(-1, -2) @ k.unsqueeze(1)
    return torch.cat(out, 2).permute(2, 0, 1, 3), state


def gated_linear_recurrence(
    x: Tensor, decay: Tensor, states: Tensor, slots: Tensor, lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """x [T, C], decay float32 [T, C], states [S, C], slots int64 [R] -> (float32 [T, C], new states float32 [R, C]).

    The leading rows of one token are computed together; the others one by one, in chunks.
    """
    value, factor, held = x.float(), decay.exp(), states.index_select(0, slots).float()
    single = _leading_rows_of_one(lens)
    stepped = held[:single] * factor[:single] + value[:single]
    out, new, begin = [stepped], [stepped], single
    for row in range(single, len(lens)):
        end, state = begin + lens[row], held[row : row + 1]
        for first in range(begin, end, _SCANNED):
            part = slice(first, min(first + _SCANNED, end))
            out.append(_scanned(value[part], factor[part], state))
            state = out[-1][-1:]
        new.append(state)
        begin = end
    return _joined(out), _joined(new)


def selective_scan(
    x: Tensor, b: Tensor, c: Tensor, rates: Tensor, step: Tensor, states: Tensor, slots: Tensor, lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """x [T, C], b, c [T, N], rates float32 [C, N], step float32 [T, C], states [S, C, N], slots int64 [R] -> (float32
    [T, C], new states float32 [R, C, N]).

    The leading rows of one token are computed together; the others one by one. Their factors are computed in chunks,
    which bounds the memory, and their states one after the other: a scan would read each of them several times.
    """
    value, key, query = x.float() * step, b.float(), c.float()
    held = states.index_select(0, slots).float()
    single = _leading_rows_of_one(lens)
    stepped = held[:single] * (step[:single].unsqueeze(-1) * rates).exp()
    stepped.addcmul_(value[:single].unsqueeze(-1), key[:single].unsqueeze(1))
    out, new, begin = [(stepped @ query[:single].unsqueeze(-1)).squeeze(-1)], [stepped], single
    for row in range(single, len(lens)):
        end, state = begin + lens[row], held[row]
        for first in range(begin, end, _SELECTED):
            part = slice(first, min(first + _SELECTED, end))
            factor = (step[part].unsqueeze(-1) * rates).exp()
            after = value[part].unsqueeze(-1) * key[part].unsqueeze(1)
            for token, of_token in enumerate(after):
                state = of_token.addcmul_(factor[token], state)
            out.append((after @ query[part].unsqueeze(-1)).squeeze(-1))
        new.append(state.unsqueeze(0).clone())
        begin = end
    return _joined(out), _joined(new)


_SELECTED = 16  # tokens
_SCANNED = 256  # tokens


def _scanned(value: Tensor, factor: Tensor, state: Tensor) -> Tensor:
    """The states after each token of one row: value, factor [T, C], state [1, C].

    Each pass doubles the number of tokens that a state has seen (Hillis and Steele 1986). No factor is divided by.
    """
    value = torch.cat((value[:1] + factor[:1] * state, value[1:]))
    span = 1
    while span < len(value):
        value = torch.cat((value[:span], value[span:] + factor[span:] * value[:-span]))
        factor = torch.cat((factor[:span], factor[span:] * factor[:-span]))
        span *= 2
    return value
