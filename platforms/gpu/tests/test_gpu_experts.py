"""Experts on a simulated GPU: every implementation keeps the contract and can be captured, and a model that has them.

Triton's kernels are interpreted, and the vendors' libraries are stand-ins.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import Small, engine, greedy, make_small, messages
from fp8_weights import FORMS, write_fp8
from models_small import small_model
from torch import Tensor, nn

from srv.errors import Refusal
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import Experts, ExpertSizes
from srv.platform.experts import TORCH_NATIVE
from srv.platform.facts import DeviceFacts, OpCall
from srv.platform.interface import OpArgs
from srv.platform.ops import Ops
from srv_gpu import expert_specs
from srv_gpu.platform import GpuPlatform
from srv_kernels.cases import Case
from srv_kernels.contracts import CONTRACTS, violations
from srv_kernels.expert_oracles import UNGATED

SIZES = {"hidden": 32, "intermediate": 32, "experts": 4, "top_k": 2}
VENDORS = (expert_specs.FLASHINFER_CUTLASS, expert_specs.AITER_MOE)
LAUNCHED = {  # as the simulators count their launches
    expert_specs.FLASHINFER_CUTLASS: "flashinfer.cutlass_fused_moe",
    expert_specs.AITER_MOE: "aiter.fused_moe",
}
FEW = ("every expert", "ids of other experts", "no token")


def vendor(platform: GpuPlatform, dtype: torch.dtype = torch.bfloat16) -> str:
    """The library whose experts this GPU has; skips without one."""
    fits = [impl for impl in platform.ops if impl.op == "experts" and impl.name in VENDORS]
    names = [impl.name for impl in fits if impl.supports_args(OpArgs(dtype, SIZES)) is None]
    if not names:
        pytest.skip("no library computes experts on this GPU: run on sm89 and newer, gfx942 or gfx950")
    return names[0]


def op_of(platform: GpuPlatform, op: str, name: str) -> Callable[..., Any]:
    (impl,) = [candidate for candidate in platform.ops if (candidate.op, candidate.name) == (op, name)]
    return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target


def broken(
    op: str,
    function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
    changed: Callable[[Case], Case] = lambda case: case,
) -> list[str]:
    """How a function violates the contract of an op, in the cases of `FEW`, which `changed` may alter."""

    def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
        yield from (changed(case) for case in CONTRACTS[op].cases(dtype, seed) if case.label.startswith(FEW))

    return violations(replace(CONTRACTS[op], cases=cases), function, dtype, device)


@pytest.mark.parametrize("op", ["route_experts", "experts", "experts_int8", "experts_gguf", "experts_fp8"])
def test_triton_keeps_the_contract(platform: GpuPlatform, op: str) -> None:
    before = platform._accelerator.module.launches[op]
    assert broken(op, op_of(platform, op, "triton"), torch.bfloat16, platform.device(0)) == []
    assert platform._accelerator.module.launches[op] > before


@pytest.mark.parametrize("op", ["route_experts", "experts", "experts_int8", "experts_fp8"])
def test_the_reference_keeps_the_contract(platform: GpuPlatform, op: str) -> None:
    function = op_of(platform, op, TORCH_NATIVE)
    assert broken(op, function, torch.float16, platform.device(0)) == []


def test_the_library_keeps_the_contract(platform: GpuPlatform) -> None:
    """With SiLU and without biases, which each library computes; of no token, none is launched."""
    name, launches = vendor(platform), platform._accelerator.module.launches
    before = launches[LAUNCHED[name]]
    problems = broken("experts", op_of(platform, "experts", name), torch.bfloat16, platform.device(0), plain_silu)
    assert problems == []
    assert launches[LAUNCHED[name]] >= before + len(FEW) - 1


def plain_silu(case: Case) -> Case:
    """The case with the activation "silu" and without biases; of experts without a gate, `up` is its own gate."""
    *inputs, first, down, _, _, activation = case.args
    gate_up = torch.cat((first, first), 1) if activation in UNGATED else first
    return replace(case, args=(*inputs, gate_up, down, None, None, "silu"))


def layer_of(platform: GpuPlatform, name: str, **changed: Any) -> Experts:
    """A layer of experts with random weights, computed by this implementation."""
    ops = Ops(platform.name, [impl for impl in platform.ops if impl.op != "experts" or impl.name == name])
    sizes = ExpertSizes(4, 2, 32, 32)._replace(**changed)
    with torch.inference_mode(False):
        layer = Experts(BuildContext(platform.device(0), torch.bfloat16, ops), "mlp.experts", sizes)
    for weight in (layer.gate_up, layer.down):
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 4)
    assert layer.implementation == name
    return layer


def inputs(platform: GpuPlatform, tokens: int, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator, device = torch.Generator().manual_seed(seed), platform.device(0)
    x = torch.randn(tokens, 32, generator=generator).bfloat16()
    ids = torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :2].contiguous()
    return x.to(device), ids.to(device), torch.rand(tokens, 2, generator=generator).to(device)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_after_loading_the_library_reads_its_own_layout(platform: GpuPlatform, activation: str) -> None:
    """The loaded weights are freed where it computes the activation, and stay where Triton does."""
    name = vendor(platform)
    layer = layer_of(platform, name, activation=activation)
    arguments = inputs(platform, 3)
    before = layer.kernel(*arguments).cpu()
    with torch.inference_mode(False):  # as a worker loads
        platform.post_load(nn.ModuleList([layer]))
    after = layer.kernel(*arguments).cpu()
    assert before.abs().max() > 0.1
    assert torch.equal(before, after)
    assert (layer.gate_up.numel() == 0) == (activation == "silu")


def test_a_captured_layer_follows_other_tokens(platform: GpuPlatform) -> None:
    if platform.graphs is None:
        pytest.skip("steps are not captured on this platform: run on cuda or rocm")
    layer = layer_of(platform, "triton")
    route = op_of(platform, "route_experts", "triton")
    x, _, _ = inputs(platform, 3)
    router = torch.randn(32, 4, generator=torch.Generator().manual_seed(5)).to(platform.device(0))

    def work() -> Tensor:
        ids, weights = route(x.float() @ router, None, 2, "softmax", True, 1, 1, 1.0)
        return layer.kernel(x, ids, weights)

    module, graph = platform._accelerator.module, platform._accelerator.graph_class()
    with module.graph(graph):
        captured = work()
    for seed in (6, 7):
        x.copy_(inputs(platform, 3, seed)[0].cpu())
        graph.replay()
        assert torch.equal(captured.cpu(), work().cpu())


def test_libraries_say_why_they_do_not_fit() -> None:
    def reasons(check: expert_specs.Reason, variant: str, dtype: str = "bfloat16", **sizes: int) -> str:
        versions = {"torch": "2.9", "flashinfer-python": "0.6.18", "flashinfer-jit-cache": "0.6.18", "amd-aiter": "1"}
        device = DeviceFacts(variant, 1 << 30, 1, versions={**versions, "prebuilt modules of amd-aiter": "9"})
        return check(device, OpCall(dtype, {**SIZES, **sizes})) or ""

    assert reasons(expert_specs.flashinfer_reason, "sm90") == ""
    assert reasons(expert_specs.aiter_reason, "gfx942") == ""
    assert "its kernels are for sm89, sm90" in reasons(expert_specs.flashinfer_reason, "sm80")
    assert "hidden 36 is not a multiple of 8" in reasons(expert_specs.flashinfer_reason, "sm90", hidden=36)
    assert "float32 is not one of bfloat16, float16" in reasons(expert_specs.flashinfer_reason, "sm90", "float32")
    assert "not gfx1100" in reasons(expert_specs.aiter_reason, "gfx1100")
    assert "intermediate 48 is not a multiple of 32" in reasons(expert_specs.aiter_reason, "gfx950", intermediate=48)
    bare = DeviceFacts("sm90", 1 << 30, 1, versions={"torch": "2.9"})
    call = OpCall("bfloat16", SIZES)
    assert "flashinfer-python is not installed" in (expert_specs.flashinfer_reason(bare, call) or "")
    assert "amd-aiter is not installed" in (expert_specs.aiter_reason(bare, call) or "")


def test_layers_of_others_are_left_alone(platform: GpuPlatform) -> None:
    layer = layer_of(platform, "triton")
    kernel = layer.kernel
    platform.post_load(nn.ModuleList([layer, nn.Identity()]))
    assert layer.kernel == kernel
    assert layer.gate_up.numel() == SIZES["experts"] * 64 * 32


def test_a_small_mixture_is_served_as_transformers_computes_it(platform: GpuPlatform, tmp_path: Path) -> None:
    """Greedy output in float32, by Triton's kernels, in captured steps where the platform has them."""
    captured = platform.graphs is not None
    with torch.inference_mode(False):
        small = make_small("qwen3_moe", tmp_path, num_hidden_layers=1)
        flags: dict[str, object] = {"graph_batch_sizes": "3"} if captured else {"disable_graphs": True}
        with engine(small, device=platform.name, **flags) as served:
            results = served.generate(messages(small.prompts[1:4], 4))
            running = {name for key, name in served.ready.kernels.items() if key.startswith(("experts ", "route_"))}
    assert [result.tokens for result in results] == [tokens[:4] for tokens in small.tokens[1:4]]
    assert running == {"triton"}


def test_a_checkpoint_in_fp8_is_served_by_triton(platform: GpuPlatform, tmp_path: Path) -> None:
    """With blocks that end within experts; by the automatic choice, and named: transformers' greedy output."""
    with torch.inference_mode(False):
        form = FORMS["fp8, blocks that end within layers"]
        model = write_fp8(tmp_path, form, kind="qwen3_moe", num_hidden_layers=1, moe_intermediate_size=80)
        prompts = [[15, 48, 61, 45, 55, 14], [21, 9]]
        small = Small(tmp_path, model, prompts, [greedy(model, prompt, 3) for prompt in prompts])
        for more in ({}, {"moe_runner_backend": "triton"}):
            with engine(small, device=platform.name, disable_graphs=True, **more) as served:
                results = served.generate(messages(small.prompts, 3))
                running = {name for key, name in served.ready.kernels.items() if key.startswith("experts_fp8 ")}
            assert [result.tokens for result in results] == small.tokens
            assert running == {"triton"}


def random_mixture(folder: Path, **fields: Any) -> Small:
    """A model on disk, and a prompt."""
    model = small_model("qwen3_moe", **fields)
    model.save_pretrained(folder)
    return Small(folder, model, [[15, 48, 61, 45, 55, 14]], [])


def test_the_library_serves_a_model_that_fits_it(platform: GpuPlatform, tmp_path: Path) -> None:
    """In bfloat16, with hidden sizes that its kernels read; and one that does not fit is refused with the reason."""
    name = vendor(platform)
    flags: dict[str, object] = {"device": platform.name, "dtype": "bfloat16", "disable_graphs": True}
    with torch.inference_mode(False):
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32}
        small = random_mixture(tmp_path / "fits", **sizes)
        with engine(small, moe_runner_backend=name, **flags) as served:
            (result,) = served.generate(messages(small.prompts, 2))
            running = {name for key, name in served.ready.kernels.items() if key.startswith("experts ")}
        assert (len(result.tokens), result.error, running) == (2, None, {name})
        odd = random_mixture(tmp_path / "odd", **{**sizes, "moe_intermediate_size": 20})
        with (
            pytest.raises(Refusal, match="intermediate 20 is not a multiple of"),
            engine(odd, moe_runner_backend=name, **flags),
        ):
            pass
