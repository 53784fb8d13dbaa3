"""The native kernels of mixtures of experts, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_cases import DTYPES, avx2_cases, normal
from torch import Tensor

from srv_kernels.cases import random_gguf_rows
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.cpu import library
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool
from srv_matrix.pytest_plugin import covers

LOADED = library.load()
if LOADED.library is not None:
    from srv_kernels.cpu import native_experts, native_library, native_linear
    from srv_kernels.cpu.native_experts import NativeExperts

pytestmark = pytest.mark.skipif(LOADED.library is None, reason=f"no native kernels here: {LOADED.reason}")
OPS = ("route_experts", "experts", "experts_int8", "experts_gguf")
GGUF_TYPES = tuple(native_linear.GGML_TYPES) if LOADED.library is not None else ("none",)
CAPABILITIES = ("gguf_codebooks",)
EXPERTS, HIDDEN, INTERMEDIATE = 5, 256, 256
KINDS = ("float", "int8", *GGUF_TYPES)


@every("dtype", DTYPES)
@every("op", OPS)
def test_ops_keep_their_contract(isa: str, threads: int, op: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        assert violations(CONTRACTS[op], getattr(native_experts, op), dtype, capabilities=CAPABILITIES) == []


@pytest.mark.parametrize("isa", ["avx2"], indirect=True)
@pytest.mark.parametrize(("op", "dtype"), avx2_cases(OPS, covers))
def test_a_newer_processor_made_to_take_the_path_of_avx2_keeps_the_contract(
    isa: str, op: str, dtype: torch.dtype
) -> None:
    assert LOADED.isa == isa
    assert violations(CONTRACTS[op], getattr(native_experts, op), dtype, capabilities=CAPABILITIES) == []


def _layer(kind: str, dtype: torch.dtype, intermediate: int = INTERMEDIATE) -> NativeExperts:
    """Experts whose matrices are stored as `kind`."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((EXPERTS, 2 * intermediate, HIDDEN), (EXPERTS, HIDDEN, intermediate))
    if kind == "float":
        gate_up, down = (native_experts.pack_floats(normal(6, *shape).to(dtype)) for shape in shapes)
    elif kind == "int8":
        gate_up, down = (
            native_experts.pack_int8(
                torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8),
                torch.rand(shape[:2], generator=generator) / 1000,
            )
            for shape in shapes
        )
    else:
        gate_up, down = (
            native_experts.pack_gguf(
                random_gguf_rows(generator, shape[0] * shape[1], shape[2], kind).view(*shape[:2], -1), kind, shape[2]
            )
            for shape in shapes
        )
    return NativeExperts(gate_up, down, "silu")


def _step(seed: int, tokens: int, dtype: torch.dtype, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights; most tokens choose expert 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :top_k].contiguous()
    ids[::3] = ids[::3].where(ids[::3] != 1, ids[::3, :1])
    ids[1::3, 0], ids[2::3, -1] = 1, 1
    return (normal(seed, tokens, HIDDEN) / 16).to(dtype), ids, torch.rand(tokens, top_k, generator=generator)


@every("dtype", DTYPES)
@every("kind", KINDS)
def test_a_token_does_not_depend_on_its_batch_or_the_threads(isa: str, kind: str, dtype: torch.dtype) -> None:
    """Expert 1 has so many tokens that blocks of 4-bit weights are unpacked, and the others have few."""
    layer, (x, ids, weights) = _layer(kind, dtype), _step(3, 70, dtype)
    together = layer(x, ids, weights)
    native_library.set_threads(3)
    try:
        for part in (slice(0, 1), slice(1, 2), slice(13, 18), slice(30, 70)):
            assert torch.equal(layer(x[part], ids[part], weights[part]), together[part])
    finally:
        native_library.set_threads(1)


def test_a_call_of_more_rows_than_one_pass_computes(isa: str) -> None:
    layer = _layer("Q4_0", torch.float32, 32)
    x, ids, weights = _step(4, 1500, torch.float32, 4)
    together = layer(x, ids, weights)
    assert torch.equal(
        torch.cat([layer(*(operand[at : at + 100] for operand in (x, ids, weights))) for at in range(0, 1500, 100)]),
        together,
    )


@every("bad", [float("nan"), float("inf")])
@every("kind", ["float", "int8", "Q8_0", "Q4_K"])
def test_non_finite_inputs_affect_only_their_token(isa: str, kind: str, bad: float) -> None:
    layer, (x, ids, weights) = _layer(kind, torch.float32), _step(5, 6, torch.float32)
    clean = layer(x, ids, weights)
    x[2, 77] = bad
    got = layer(x, ids, weights)
    assert not bool(got[2].isfinite().any())
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], clean[others])


def test_an_expert_chosen_twice_counts_twice(isa: str) -> None:
    layer, (x, _, _) = _layer("float", torch.float32), _step(6, 3, torch.float32)
    twice = layer(x, torch.full((3, 2), 4), torch.tensor([[0.5, 0.25]]).repeat(3, 1))
    once = layer(x, torch.full((3, 1), 4), torch.full((3, 1), 0.75))
    torch.testing.assert_close(twice, once)


def test_no_expert_at_all_gives_zeros(isa: str) -> None:
    layer, (x, ids, weights) = _layer("Q8_0", torch.bfloat16), _step(7, 4, torch.bfloat16)
    assert torch.equal(layer(x, torch.full_like(ids, EXPERTS), weights), torch.zeros_like(x))
    assert layer(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    hidden=st.integers(1, 150),
    intermediate=st.integers(1, 80),
    biases=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    workers=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_sums_of_integers_are_exact(
    isa: str,
    tokens: int,
    experts: int,
    hidden: int,
    intermediate: int,
    biases: bool,
    dtype: torch.dtype,
    workers: int,
    seed: int,
) -> None:
    """With the clamped activation of gates above 7, gate · sigmoid is a constant; `up` is a small integer."""
    native_library.set_threads(workers)
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    x, top_k = integers(-2, 2, tokens, hidden), min(3, experts)
    gate, up = torch.zeros(experts, intermediate, hidden), integers(0, 1, experts, intermediate, hidden)
    down = integers(-3, 3, experts, hidden, intermediate)
    up[..., 3:] = 0  # at most 6
    added = torch.cat((torch.full((experts, intermediate), 8), torch.zeros(experts, intermediate)), 1)
    last = integers(-5, 5, experts, hidden) if biases else torch.zeros(experts, hidden)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    weights = 2.0 ** integers(-1, 1, tokens, top_k)
    factor = 7 / (1 + torch.tensor(-7 * 1.702).exp())
    parts = (torch.einsum("th,tkih->tki", x.double(), up[ids].double()) + 1) * float(factor)
    want = torch.einsum("tki,tkhi->tkh", parts, down[ids].double()) + last[ids].double()
    magnitude = torch.einsum("tki,tkhi->tkh", parts.abs(), down[ids].double().abs()) + last[ids].double().abs()
    want, magnitude = ((sums * weights.double()[..., None]).sum(1) for sums in (want, magnitude))
    got = native_experts.experts(
        x.to(dtype),
        ids,
        weights,
        torch.cat((gate, up), 1).to(dtype),
        down.to(dtype),
        added.to(dtype),
        last.to(dtype),
        "swiglu_clamped",
    )
    native_library.set_threads(1)
    error = 1e-5 if dtype == torch.float32 else 2.0**-7
    assert bool(((got.double() - want).abs() <= error * magnitude + 1e-30).all())


def test_a_captured_step_replays_other_choices() -> None:
    """The experts of each token are read at each replay, as are its inputs."""
    layer = _layer("Q4_K", torch.float32)
    router = native_linear.linear(normal(8, EXPERTS, HIDDEN), None)

    def work(x: Tensor) -> Tensor:
        ids, weights = native_experts.route_experts(router(x), None, 2, "softmax", True, 1, 1, 1.0)
        return layer(x, ids, weights)

    x = normal(9, 3, HIDDEN)
    with torch.inference_mode():
        with CapturedGraph(GraphMemoryPool()) as graph:
            out = work(x)
        assert (graph.native_calls, graph.torch_calls) == (3, 0)
        for seed in (10, 11):
            x.copy_(normal(seed, 3, HIDDEN))
            graph.replay()
            assert torch.equal(out, work(x))


def test_logits_that_are_not_numbers_choose_different_experts(isa: str) -> None:
    logits = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0], [float("nan")] * 4, [float("-inf")] * 4])
    for scoring in native_experts.SCORINGS:
        ids, _ = native_experts.route_experts(logits, None, 3, scoring, True, 1, 1, 1.0)
        assert ids.tolist() == [[3, 1, 0], [0, 1, 2], [0, 1, 2]]


@every(
    ("call", "message"),
    [
        (lambda: _routed(4, 1, 1), "cannot choose 4 of 3 experts in the best 1 of 1 groups"),
        (lambda: _routed(1, 2, 1), "cannot choose 1 of 3 experts in the best 1 of 2 groups"),
        (lambda: _routed(1, 3, 4), "cannot choose 1 of 3 experts in the best 4 of 3 groups"),
        (lambda: _routed(2, 3, 1), "cannot choose 2 of 3 experts in the best 1 of 3 groups"),
        (lambda: _layer("float", torch.float32)(*_step(1, 2, torch.bfloat16)), "x is torch.bfloat16, but the weights"),
        (lambda: _called(x=torch.zeros(2, 7)), "x has 7 columns, but the weight has 256 inputs"),
        (lambda: _called(ids=torch.zeros(3, 2, dtype=torch.int64)), r"2 tokens have ids \[3, 2\] and weights \[2, 2\]"),
        (lambda: _called(ids=torch.zeros(2, 2, dtype=torch.int32)), "ids are torch.int32 and weights torch.float32"),
        (lambda: _of(torch.zeros(2, 6, 4), torch.zeros(2, 4, 2)), r"they must be \[2 I, H\] and \[H, I\]"),
        (lambda: _of(torch.zeros(2, 6, 4), torch.zeros(2, 4, 3).bfloat16()), "they must have one dtype"),
        (lambda: _of(torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), "relu"), "activation relu is not one of silu"),
        (lambda: native_experts.pack_floats(torch.zeros(2, 6, 4), torch.zeros(6)), r"these weights need torch.float32"),
        (
            lambda: native_experts.pack_gguf(torch.zeros(2, 4, 100, dtype=torch.uint8), "Q8_0", 96),
            "96 weights of type Q8_0 do not take 100 bytes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def _routed(top_k: int, groups: int, top_groups: int) -> object:
    return native_experts.route_experts(torch.zeros(2, 3), None, top_k, "softmax", False, groups, top_groups, 1.0)


def _called(**changed: Tensor) -> Tensor:
    x, ids, weights = _step(1, 2, torch.float32)
    return _layer("float", torch.float32)(**({"x": x, "ids": ids, "weights": weights} | changed))


def _of(gate_up: Tensor, down: Tensor, activation: str = "silu") -> NativeExperts:
    return NativeExperts(native_experts.pack_floats(gate_up), native_experts.pack_floats(down), activation)
