"""Every implementation of every op satisfies its contract."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from every import every
from torch.utils._python_dispatch import TorchDispatchMode

from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.tolerances import DTYPES

CAPABILITIES = ("gguf_codebooks",)
IMPLEMENTATIONS = [
    *((name, contract.reference) for name, contract in CONTRACTS.items()),
    ("rms_norm", "srv_kernels.cpu.torch_ops:rms_norm"),
    ("add_rms_norm", "srv_kernels.cpu.torch_ops:add_rms_norm"),
]


@every("dtype", DTYPES)
@every(("op", "target"), IMPLEMENTATIONS)
def test_implementation_keeps_its_contract(op: str, target: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert (
            violations(CONTRACTS[op], pkgutil.resolve_name(target), dtype, capabilities=CAPABILITIES, large=True) == []
        )


@every("op", list(CONTRACTS))
def test_calls_are_measured_by_the_sizes_that_implementations_are_selected_by(op: str) -> None:
    contract = CONTRACTS[op]
    measured = [contract.sizes_of(case) for case in contract.cases(torch.float32, 0)]
    assert measured
    for sizes in measured:
        assert tuple(sizes) == contract.sizes
        assert all(type(size) is int and size > 0 for size in sizes.values()), sizes


def test_calls_of_unsupported_sizes_are_left_out() -> None:
    calls: list[int] = []

    def even_only(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append(x.shape[-1])
        return CONTRACTS["rms_norm"].oracle(x, weight, eps).to(x.dtype)  # type: ignore[union-attr]

    assert (
        violations(CONTRACTS["rms_norm"], even_only, torch.float32, supports=lambda sizes: sizes["dim"] % 2 == 0) == []
    )
    assert calls
    assert not any(size % 2 for size in calls)


def test_a_violation_names_the_element_by_its_indices() -> None:
    def last_is_zero(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = CONTRACTS["rms_norm"].oracle(x, weight, eps).to(x.dtype)  # type: ignore[union-attr]
        out[..., -1:] = 0
        return out

    problems = violations(CONTRACTS["rms_norm"], last_is_zero, torch.float32)
    assert any("element [0, 63] of [1, 64] is 0, not" in problem for problem in problems), problems[:3]


@every("shape", [(2, 3, 64), (64,)])
def test_norms_take_any_leading_axes(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(64)
    for target in ("srv_kernels.reference:rms_norm", "srv_kernels.cpu.torch_ops:rms_norm"):
        got = pkgutil.resolve_name(target)(x.bfloat16(), weight.bfloat16(), 1e-6)
        want = CONTRACTS["rms_norm"].oracle(x.bfloat16(), weight.bfloat16(), 1e-6)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_norm_rounds_before_the_weight_as_published_models_do() -> None:
    """As transformers does: float32 norm, cast, then the weight. The order affects the last bit of bfloat16."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 576, generator=generator).bfloat16()
    weight = torch.randn(576, generator=generator).bfloat16()
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    for target in ("srv_kernels.reference:rms_norm", "srv_kernels.cpu.torch_ops:rms_norm"):
        norm = pkgutil.resolve_name(target)
        assert torch.equal(norm(x, weight, 1e-5), want)
        assert torch.equal(norm(x[:1], weight, 1e-5), want[:1])


@every("op", ["causal_conv1d", "gated_delta_rule", "gated_linear_recurrence", "selective_scan", "state_space_scan"])
def test_rows_that_decode_beside_a_prompt_are_computed_together(op: str) -> None:
    """A step with more of them calls as many operators."""

    def operators(rows: int) -> int:
        tokens, slots = rows + 5, torch.arange(rows + 1)
        lens = (*(1,) * rows, 5)
        if op == "causal_conv1d":
            args: tuple[Any, ...] = (torch.ones(tokens, 8), torch.ones(8, 4), None, torch.ones(rows + 1, 8, 4))
        elif op == "gated_linear_recurrence":
            args = (torch.ones(tokens, 8), torch.zeros(tokens, 8), torch.ones(rows + 1, 8))
        elif op == "selective_scan":
            keys, rates = torch.ones(tokens, 4), torch.zeros(8, 4)
            args = (torch.ones(tokens, 8), keys, keys, rates, torch.ones(tokens, 8), torch.ones(rows + 1, 8, 4))
        else:
            vectors, rates = torch.ones(tokens, 2, 8), torch.zeros(tokens, 2)
            args = (vectors, vectors, vectors, rates, rates, torch.ones(rows + 1, 2, 8, 8))  # of either op
        with torch.inference_mode(), CountedOperators() as counted:
            pkgutil.resolve_name(CONTRACTS[op].reference)(*args, slots, lens)
        return counted.calls

    assert operators(32) == operators(2)


class CountedOperators(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class TestViolations:
    """The checker reports each kind of violation."""

    def _found(self, implementation: Any, op: str = "rms_norm") -> str:
        return "\n".join(violations(CONTRACTS[op], implementation, torch.float32))

    def test_wrong_numbers(self) -> None:
        assert "result 0: element " in self._found(lambda x, weight, eps: x * weight)

    def test_nan(self) -> None:
        assert "is nan, not" in self._found(lambda x, weight, eps: x * torch.nan)

    def test_changed_argument(self) -> None:
        def in_place(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate, inplace=True) * up

        assert "argument 0 was changed" in self._found(in_place, "silu_and_mul")

    def test_wrong_dtype_and_shape(self) -> None:
        assert "its dtype is torch.float64" in self._found(lambda x, weight, eps: x.double())
        assert "its shape is" in self._found(lambda x, weight, eps: x[:, :1])

    def test_wrong_number_of_results(self) -> None:
        assert "1 results, not 2" in self._found(lambda x, residual, weight, eps: x, "add_rms_norm")
