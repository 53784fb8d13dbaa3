"""One rank of an exchange of rows on simulated NPUs: `python exchange_of_rank.py RANK SIZE FOLDER`; prints results."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.expert_exchange import ExchangeSizes, ExpertExchange, through_experts
from srv_kernels.expert_reference import experts_int8
from srv_npu.expert_exchange import AscendBuffer, FusedInt8Experts, LowLatencyExchange, NormalExchange
from srv_npu.sdk import load_sdk

HIDDEN, INNER, EXPERTS, TOP_K, LIMIT = 1024, 512, 6, 2, 4
CASES: dict[str, tuple[int, int]] = {"all": (4, 4), "uneven": (1, 3), "nothing": (0, 2), "rounds": (9, 2)}


def tokens_of(rank: int, count: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + count)
    x = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    if kind == "uneven":
        ids[:, 1] = -1
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def wanted(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Expert e multiplies by e + 1, whose results are exact in bfloat16 but for one rounding."""
    factors = ((ids + 1) * (ids >= 0) * weights).sum(1, keepdim=True)
    return x.double() * factors


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sdk = load_sdk()
    device = torch.device("npu", rank)
    sdk.npu.set_device(device)
    buffer = AscendBuffer(sdk, RankGroup("experts-0", rank, size, folder, 60.0, 120.0), device)
    sizes = ExchangeSizes(EXPERTS, TOP_K, HIDDEN, LIMIT)
    first = rank * sizes.local(size)

    def compute(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        factors = torch.where(ids < 0, 0, ids + first + 1)
        return (rows.float() * factors * weights).to(rows.dtype)

    errors: dict[str, Any] = {}
    exchanges: dict[str, ExpertExchange] = {
        "normal": NormalExchange(buffer, sizes),
        "low latency": LowLatencyExchange(buffer, sizes),
    }
    for form, exchange in exchanges.items():
        for kind, counts in CASES.items():
            own = tokens_of(rank, counts[rank], kind)
            result = through_experts(exchange, *(each.to(device) for each in own), compute, max(counts)).cpu()
            assert result.shape == own[0].shape
            error = (result.double() - wanted(*own)).abs() / wanted(*own).abs().clamp(min=1.0)
            errors[f"{form}, {kind}"] = float(error.max()) if counts[rank] else 0.0
    if sdk.npu.soc.key == "a3":
        errors["fused"] = fused(sdk, buffer, rank, size, device)
    errors["captured"] = captured(sdk, exchanges["low latency"], compute, rank, device)
    buffer.abort()
    print(json.dumps(errors))


def fused(sdk: Any, buffer: AscendBuffer, rank: int, size: int, device: torch.device) -> float:
    """The largest error of int8 experts, relative to the largest result; rank 0 has no tokens."""
    generator = torch.Generator().manual_seed(7)
    sdk.npu.config.allow_internal_format = True
    gate_up = torch.randint(-40, 40, (EXPERTS, 2 * INNER, HIDDEN), dtype=torch.int8, generator=generator)
    down = torch.randint(-40, 40, (EXPERTS, HIDDEN, INNER), dtype=torch.int8, generator=generator)
    scales = [torch.rand(EXPERTS, rows, generator=generator) * 2e-3 for rows in (2 * INNER, HIDDEN)]
    begin, end = rank * EXPERTS // size, (rank + 1) * EXPERTS // size
    own = [each[begin:end].to(device) for each in (gate_up, scales[0], down, scales[1])]
    sizes = ExchangeSizes(EXPERTS, TOP_K, HIDDEN, LIMIT)
    x, ids, weights = tokens_of(rank, 3 * rank, "all")
    out = FusedInt8Experts(buffer, sdk, sizes, *own)(x.to(device), ids.to(device), weights.to(device)).cpu()
    assert out.shape == x.shape
    whole = experts_int8(x.float(), ids, weights, gate_up, scales[0], down, scales[1], "silu")
    return float((out.float() - whole).abs().max() / whole.abs().max()) if len(x) else 0.0


def captured(sdk: Any, exchange: ExpertExchange, compute: Any, rank: int, device: torch.device) -> float:
    """The largest error of two replays with other tokens than those of the capture."""
    x, ids, weights = (each.to(device) for each in tokens_of(rank, 3, "all"))
    graph, largest = sdk.npu.NPUGraph(), 0.0
    with torch.inference_mode():
        with sdk.npu.graph(graph):
            dispatched = exchange.dispatch(x, ids, weights)
            out = exchange.combine(compute(dispatched.rows, dispatched.ids, dispatched.weights), dispatched)
        for seed in (2, 3):
            own = tokens_of(rank + seed, 3, "all")
            for target, value in zip((x, ids, weights), own, strict=True):
                target.copy_(value)
            graph.replay()
            error = (out.cpu().double() - wanted(*own)).abs() / wanted(*own).abs().clamp(min=1.0)
            largest = max(largest, float(error.max()))
    return largest


if __name__ == "__main__":
    main()
