"""Triton's experts: their contracts, the alignment of tokens by expert, and what routing does with unusual numbers.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from every import every
from kernel_device import kernel_device
from torch import Tensor

from srv_kernels.cases import Case, random_fp8, random_gguf_rows
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.tolerances import DTYPES

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import moe  # noqa: F401  registers the operators
from srv_kernels.triton.moe_alignment import align, most_blocks

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")

OPS = torch.ops.srv_triton
EXPERTS = ("experts", "experts_int8", "experts_gguf", "experts_fp8")
FEW = ("experts without a token", "every expert", "ids of other experts", "no token", "odd sizes")


def _broken(op: str, dtype: torch.dtype, labels: tuple[str, ...] = ()) -> list[str]:
    """The violations of a contract by the operator, on the cases whose labels begin so; on all without labels."""

    def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
        chosen = [case for case in CONTRACTS[op].cases(dtype, seed) if case.label.startswith(labels or "")]
        assert chosen
        yield from chosen

    return violations(replace(CONTRACTS[op], cases=cases), getattr(OPS, op), dtype, DEVICE)


def test_routing_keeps_its_contract() -> None:
    small = (
        "Mixtral",
        "DeepSeek",
        "gpt-oss",
        "every",
        "one",
        "no",
        "groups",
        "a bias",
        "rows",
        "equal",
        "some",
        "large",
    )
    assert _broken("route_experts", torch.bfloat16, small) == []


def test_experts_keep_their_contract() -> None:
    assert _broken("experts", torch.float32, FEW) == []
    assert _broken("experts", torch.bfloat16, FEW[1:3]) == []
    without_gate = "odd numbers of tokens and experts, relu2"
    assert _broken("experts_int8", torch.float16, ("experts without a token", without_gate)) == []
    assert _broken("experts_gguf", torch.bfloat16, ("experts without a token", "without a gate")) == []
    assert _broken("experts_fp8", torch.bfloat16, ("experts without a token", "every expert", "odd sizes")) == []


@pytest.mark.slow
@every("op", ("route_experts", *EXPERTS))
def test_ops_keep_their_contract_on_all_cases(op: str) -> None:
    assert _broken(op, torch.bfloat16) == []


@pytest.mark.slow
@every("dtype", [dtype for dtype in DTYPES if dtype != torch.bfloat16])
def test_other_dtypes_keep_the_contract(dtype: torch.dtype) -> None:
    assert _broken("experts", dtype, ("five tokens", "odd")) == []
    assert _broken("experts_int8", dtype, ("one token", "odd numbers")) == []
    assert _broken("experts_fp8", dtype) == []


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _ids(seed: int, tokens: int, top_k: int, experts: int) -> Tensor:
    order = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[:, :top_k].contiguous().to(DEVICE)


@every(("tokens", "top_k", "experts", "rows"), [(5, 3, 4, 2), (1, 2, 9, 16), (40, 1, 3, 4)])
def test_alignment_has_each_pair_once_in_a_block_of_its_expert(
    tokens: int, top_k: int, experts: int, rows: int
) -> None:
    ids = _ids(1, tokens, top_k, experts)
    ids[-1, 0], ids[0, -1] = experts, -1  # experts of nobody
    alignment = align(ids, experts, rows)
    flat, blocks = ids.flatten().cpu(), alignment.sorted.view(-1, rows).cpu()
    used = (alignment.block_expert >= 0).sum().item()
    seen = []
    for expert, block in zip(alignment.block_expert[:used].tolist(), blocks[:used].tolist(), strict=True):
        pairs = [pair for pair in block if pair < ids.numel()]
        assert pairs == block[: len(pairs)], "a hole before a pair"
        assert all(flat[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == [pair for pair in range(ids.numel()) if 0 <= flat[pair] < experts]
    assert seen == sorted(seen, key=lambda pair: (int(flat[pair]), pair))
    assert alignment.block_expert[:used].tolist() == sorted(alignment.block_expert[:used].tolist())
    assert (alignment.block_expert[used:] == -1).all()


def test_no_ids_need_more_blocks_than_are_allocated() -> None:
    """By a search of all counts of pairs per expert; and for some, every block that is allocated is needed."""

    def counts(pairs: int, experts: int) -> Iterator[tuple[int, ...]]:
        if experts == 1:
            yield (pairs,)
            return
        for first in range(pairs + 1):
            yield from ((first, *rest) for rest in counts(pairs - first, experts - 1))

    for pairs in range(1, 9):
        for experts in range(1, 4):
            for rows in (1, 2, 3, 16):
                needed = max(sum(-(-count // rows) for count in by_expert) for by_expert in counts(pairs, experts))
                assert needed == most_blocks(pairs, experts, rows)


def test_a_token_does_not_depend_on_the_others() -> None:
    x, ids, weights = _random(2, 6, 32).bfloat16(), _ids(3, 6, 2, 4), _random(4, 6, 2).abs()
    gate_up, down = _random(5, 4, 48, 32).bfloat16(), _random(6, 4, 32, 24).bfloat16()
    together = OPS.experts(x, ids, weights, gate_up, down, None, None, "silu")
    for row in (0, 5):
        only = slice(row, row + 1)
        alone = OPS.experts(x[only], ids[only], weights[only], gate_up, down, None, None, "silu")
        assert torch.equal(alone[0], together[row])


def test_weights_of_an_expert_that_nobody_chose_are_not_read() -> None:
    x, ids, weights = _random(7, 3, 32), torch.tensor([[0, 2], [2, 0], [0, 2]], device=DEVICE), _random(8, 3, 2)
    gate_up, down = _random(9, 3, 48, 32), _random(10, 3, 32, 24)
    gate_up[1], down[1] = torch.nan, torch.nan
    assert OPS.experts(x, ids, weights, gate_up, down, None, None, "gelu_tanh").isfinite().all()


def test_a_token_that_is_not_finite_stays_so_and_affects_no_other() -> None:
    x, ids, weights = _random(11, 3, 32), _ids(12, 3, 2, 3), _random(13, 3, 2)
    gate_up, down = _random(14, 3, 48, 32), _random(15, 3, 32, 24)
    want = OPS.experts(x, ids, weights, gate_up, down, None, None, "swiglu_clamped")
    x[1, 3] = torch.nan
    got = OPS.experts(x, ids, weights, gate_up, down, None, None, "swiglu_clamped")
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@every("scoring", ["softmax", "sigmoid", "softmax_of_top_k"])
def test_ids_are_in_range_and_distinct_whatever_the_logits(scoring: str) -> None:
    logits = torch.tensor([[1.0, torch.nan, 2.0, 0.0], [torch.nan] * 4, [-torch.inf, torch.inf, 0, 1]], device=DEVICE)
    ids, weights = OPS.route_experts(logits, None, 3, scoring, False, 2, 2, 1.0)
    assert all(len(set(row)) == 3 and set(row) <= set(range(4)) for row in ids.tolist())
    assert weights[1].isnan().all() or scoring == "softmax_of_top_k"


@every("blocks", [(1, 32), (128, 128), (1 << 20, 1 << 20)])
@pytest.mark.slow
def test_every_fp8_weight_has_the_value_of_torch(blocks: tuple[int, int]) -> None:
    """Of each code of a finite number, in each dtype of x: rows of x choose single weights."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(2, 127)
    hidden, inner = 128, 4
    up = torch.zeros(1, 2 * inner, hidden, dtype=torch.uint8)
    up[0, :2, :127] = codes  # of the gate
    up[0, inner:, 127] = 0x38  # 1.0
    rows, columns = (-(-size // block) for size, block in zip((inner, hidden), blocks, strict=True))
    down = torch.eye(hidden, inner).to(torch.float8_e4m3fn)[None]
    scales = torch.ones(1, 2 * rows, columns), torch.ones(1, -(-hidden // blocks[0]), 1)
    ids, weights = torch.zeros(127, 1, dtype=torch.int64), torch.ones(127, 1)
    for dtype in DTYPES:
        x = torch.eye(128, dtype=dtype)[:127]
        x[:, 127] = 1
        operands = (x, ids, weights, up.view(torch.float8_e4m3fn), scales[0], down, scales[1])
        product = OPS.experts_fp8(*(tensor.to(DEVICE) for tensor in operands), *blocks, "silu").cpu()
        want = torch.nn.functional.silu(codes.view(torch.float8_e4m3fn).float().T).to(dtype)
        torch.testing.assert_close(product[:, :2], want, rtol=2**-7, atol=1e-4)


def test_experts_that_nobody_chose_are_not_read_nor_their_scales() -> None:
    x, ids, weights = _random(22, 3, 32), torch.tensor([[0, 2], [2, 0], [0, 2]], device=DEVICE), _random(23, 3, 2)
    generator = torch.Generator().manual_seed(24)
    gate_up, down = (random_fp8(generator, 3, *shape).to(DEVICE) for shape in ((48, 32), (32, 24)))
    scales = torch.full((3, 48, 1), 0.01, device=DEVICE), torch.full((3, 32, 1), 0.01, device=DEVICE)
    for scale in scales:
        scale[1] = torch.nan
    assert OPS.experts_fp8(x, ids, weights, gate_up, scales[0], down, scales[1], 1, 32, "silu").isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(1, 6, device=DEVICE)
    for arguments, why in (
        ((2, "tanh", False, 1, 1, 1.0), "scoring is tanh, not one of softmax, sigmoid, softmax_of_top_k"),
        ((7, "softmax", False, 1, 1, 1.0), "top_k is 7, but 6 experts can be chosen"),
        ((3, "softmax", False, 3, 1, 1.0), "top_k is 3, but 2 experts can be chosen"),
        ((1, "softmax", False, 4, 1, 1.0), "6 experts in 4 groups"),
    ):
        with pytest.raises(ValueError, match=why):
            OPS.route_experts(logits, None, *arguments)
    x, ids, weights = _random(16, 2, 32), _ids(17, 2, 1, 2), _random(18, 2, 1)
    gate_up, down = _random(19, 2, 8, 32), _random(20, 2, 32, 4)
    with pytest.raises(
        ValueError, match="activation is relu, not one of silu, gelu_tanh, swiglu_clamped, silu_clamped, relu2"
    ):
        OPS.experts(x, ids, weights, gate_up, down, None, None, "relu")
    with pytest.raises(ValueError, match="x has 31 columns, but the experts have 32 inputs"):
        OPS.experts(x[:, 1:], ids, weights, gate_up, down, None, None, "silu")
    with pytest.raises(ValueError, match=r"ids and weights are \(1, 1\) and \(2, 1\), not both of 2 rows"):
        OPS.experts(x, ids[1:], weights, gate_up, down, None, None, "silu")
    generator = torch.Generator().manual_seed(21)
    rows = random_gguf_rows(generator, 16, 32, "Q8_0").view(2, 8, -1).to(DEVICE)
    short = random_gguf_rows(generator, 64, 32, "Q4_0").view(2, 32, -1).to(DEVICE)
    with pytest.raises(ValueError, match="gate_up has 4 outputs, but down has 32 inputs"):
        OPS.experts_gguf(x, ids, weights, rows, "Q8_0", short, "Q4_0", "silu")
    fp8, wide = (torch.zeros(shape, device=DEVICE).to(torch.float8_e4m3fn) for shape in ((2, 8, 32), (2, 32, 5)))
    scale = torch.ones(2, 8, 1, device=DEVICE)
    with pytest.raises(ValueError, match="gate_up has 4 outputs, but down has 5 inputs"):
        OPS.experts_fp8(x, ids, weights, fp8, scale, wide, torch.ones(2, 32, 1, device=DEVICE), 1, 32, "silu")
    with pytest.raises(ValueError, match=r"scales of gate_up are \(2, 8, 1\), not \(2, 2, 1\), for blocks of 4 x 32"):
        OPS.experts_fp8(x, ids, weights, fp8, scale, wide[..., :4], scale, 4, 32, "silu")
    with pytest.raises(ValueError, match="no kernel for IQ2_XS"):
        OPS.experts_gguf(x, ids, weights, rows, "IQ2_XS", short, "Q4_0", "silu")


def test_shapes_on_the_meta_device() -> None:
    meta = torch.device("meta")
    x, ids, weights = torch.empty(3, 8, device=meta), torch.empty(3, 2, device=meta), torch.empty(3, 2, device=meta)
    gate_up, down = torch.empty(4, 6, 8, device=meta), torch.empty(4, 8, 3, device=meta)
    assert OPS.experts(x.half(), ids, weights, gate_up, down, None, None, "silu").shape == (3, 8)
    chosen, factors = OPS.route_experts(torch.empty(3, 4, device=meta), None, 2, "softmax", True, 1, 1, 1.0)
    assert (chosen.shape, chosen.dtype, factors.dtype) == ((3, 2), torch.int64, torch.float32)
