"""The kernel plan: what it says for hardware that is absent, what it refuses, and that an engine runs what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mixed_weights
import pytest
import torch
from packed_weights import FORMS, write_packed
from safetensors.torch import save_file

from srv.errors import Refusal
from srv.io.messages import Stats
from srv.models import derive
from srv.models.facts.checkpoint_tensors import checkpoint_tensors
from srv.models.families.trees import native_tree
from srv.planning.kernel import Kernel
from srv.planning.kernel_ops import OpTable, op_kernels
from srv.planning.launchable import check_launch
from srv.planning.plan import LaunchPlan, make_plan
from srv.planning.target import Target, find_target
from srv.platform.facts import DeviceFacts, OpCall, OpSpec
from srv.platform.interface import OpArgs
from srv.platform.op_choice import choose_op
from srv.platform.ops import Ops
from srv.platform.registry import find_platforms
from srv.sched.plan import SlowReason
from srv.server.observe.metrics import Metrics
from srv.testing.engine import LocalEngine, user_input
from srv.types import RequestSpec, SamplingParams

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
del GEMMA3["hidden_act"], GEMMA3["rope_theta"]
STABLELM = LLAMA | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "qk_layernorm": True}
DEEPSEEK = {name: value for name, value in LLAMA.items() if name not in ("head_dim", "num_key_value_heads")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 48},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
GLM_DSA = DEEPSEEK | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    **{"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "indexer_types": ["full", "shared"]},
}
AXK2 = DEEPSEEK | {
    "architectures": ["AXK2ForCausalLM"],
    "model_type": "axk2",
    **{"index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "n_group": None, "topk_group": None},
    "gated_norm_rank": 8,
}
HY_V4 = GLM_DSA | {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "n_group": 1}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 97,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 2,
    "dtype": "bfloat16",
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": [0],
}
QWEN3_5_MOE = QWEN3_NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
LFM2 = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "full_attn_idxs": [1],
    "conv_bias": True,
    "tie_word_embeddings": True,
}
LFM2_MOE = LFM2 | {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "layer_types": ["conv", "full_attention"],
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
GRANITE_HYBRID = (
    LLAMA
    | MAMBA
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
    }
)
GRANITE_DENSE = GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"}
BAMBA = LLAMA | MAMBA | {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [0]}
FALCON_H1 = LLAMA | MAMBA | {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 128}
MINIMAX = LLAMA | {"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "num_local_experts": 4}
LFM3 = LLAMA | {
    "architectures": ["Lfm3ForCausalLM"],
    "model_type": "lfm3",
    "layer_types": ["conv", "full_attention"],
    "rope_parameters": None,
}
RECURRENT_GEMMA = LLAMA | {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "model_type": "recurrent_gemma",
    "block_types": ["recurrent", "attention"],
}
APERTUS = LLAMA | {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
NEMOTRON = LLAMA | {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2"}
OLMO_HYBRID = LLAMA | {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid"}
QWEN3_MOE_FP8 = LLAMA | {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
}
UNKNOWN = LLAMA | {"hidden_act": "gelu"}  # no native layers


def model(folder: Path, config: dict[str, Any]) -> list[str]:
    """The arguments of a launch of this configuration with random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return ["--model-path", str(folder), "--load-format", "dummy"]


def planned(*arguments: str) -> LaunchPlan:
    return make_plan(user_input(arguments))


def find(plan: LaunchPlan, key: str) -> Kernel:
    return next(kernel for kernel in plan.kernels.kernels if kernel.key == key)


def refused(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """What a launch refuses, as a plan says."""
    try:
        refusals = planned(*arguments).refusals
    except Refusal as refusal:
        refusals = tuple(refusal.rejections)
    return [(entry.code, entry.what) for entry in refusals]


def test_the_kernels_of_absent_hardware_are_planned_with_their_reasons(tmp_path: Path) -> None:
    plan = planned("--device", "cuda:sm90", *model(tmp_path, GEMMA3))
    full, window = (find(plan, f"attention prefill group={number}") for number in range(2))
    assert (full.what, window.what) == (
        "full attention of layer 2, prompts",
        "attention within 16 tokens of layers 0-1, prompts",
    )
    assert full.name == "triton"
    assert "head_dim 32 is not among" in dict(full.rejected)["flashinfer"]
    assert "does not call it" in dict(full.rejected)["fa3"]
    assert full.slower == ""
    norm = find(plan, "rms_norm float32 dim=64")
    assert (norm.name, norm.rejected) == (
        "triton",
        (("torch (reference)", "fits, but the platform prefers triton"),),
    )
    assert find(plan, "gelu_tanh_and_mul bfloat16 dim=96").name == "triton"
    assert find(plan, "logits bfloat16 inputs=64").name == "torch (mm)"
    assert find(plan, "write_kv decode").name == "triton"
    assert find(plan, "steps decode").name.startswith("captured graphs")  # type: ignore[union-attr]


def test_a_plan_says_which_form_prompts_of_latent_attention_take(tmp_path: Path) -> None:
    """Decode steps have one form, and backends that say nothing add nothing."""

    def because(config: dict[str, Any], *more: str, device: str = "cpu:avx512", slot: str = "prefill") -> str:
        arguments = ["--device", device, *model(tmp_path, config), *more]
        return find(planned(*arguments), f"attention {slot} group=0").because

    packed = DEEPSEEK | {"v_head_dim": 32}
    assert because(packed).endswith(
        "; prompts and, after a long prefix, rows of at least 28 new tokens compute the keys and values of each head, "
        "for 1,024 keys at a time, and others attend to the compressed vectors"
    )
    for flag in ("disable-mla-ragged-prefill", "enable-deterministic-inference"):
        reason = f"because {flag.replace('-', '_')} is set"
        assert because(packed, f"--{flag}").endswith(f"; all rows attend to the compressed vectors, {reason}")
    assert "; all rows attend to the compressed vectors, because keys of 16 and values of 24" in because(DEEPSEEK)
    torch_native = because(packed, "--attention-backend", "torch_native", "--disable-chunked-prefix-cache")
    assert "; rows of at least 96 new tokens compute the keys and values of each head, for all keys" in torch_native
    assert "compressed" not in because(packed, slot="decode") + because(packed, device="npu:a3")


@pytest.mark.parametrize(
    ("device", "name"), [("cuda:sm90", "torch (mm)"), ("rocm:gfx942", "triton"), ("xpu:pvc", "triton")]
)
def test_logits_in_float32_come_from_the_kernel_that_each_gpu_has(tmp_path: Path, device: str, name: str) -> None:
    logits = find(planned("--device", device, *model(tmp_path, LLAMA)), "logits bfloat16 inputs=64")
    assert (logits.name, logits.slower) == (name, "")
    assert "with float32 results" in logits.what


@pytest.mark.parametrize("device", ["cuda:sm90", "rocm:gfx942", "xpu:bmg", "npu:a3"])
def test_platforms_without_an_indexer_refuse_the_model_by_name(tmp_path: Path, device: str) -> None:
    arguments = ["--device", device, *model(tmp_path, GLM_DSA)]
    assert ("no_backend_fits", "attention backend") in refused(arguments)
    try:
        reasons = [refusal.reason for refusal in planned(*arguments).refusals]
    except Refusal as refusal:
        reasons = [rejection.reason for rejection in refusal.rejections]
    (reason,) = (text for text in reasons if "indexer" in text)
    assert "keys chosen by an indexer (sparse attention)" in reason
    assert "latent attention (MLA), it cannot" not in reason, "the same layers are named twice"


def test_a_router_with_a_bias_rounds_its_sums() -> None:
    """Kernels with float32 results add no bias, so the layers of GPT-OSS do not call them."""
    facts = find_platforms()["cuda"].loaded.facts
    table = OpTable("cuda", facts.ops, facts.profiles["sm90"], "float16")
    for architecture, rounded in (("GptOssForCausalLM", True), ("MixtralForCausalLM", False)):
        tree = native_tree(architecture, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2})
        ops = derive.model_ops(tree, "float16")
        kernels = {kernel.key.partition(" ")[0]: kernel for kernel in op_kernels(table, ops, lambda *layer: None)}
        assert "with results rounded" in kernels["router"].what if rounded else "float32" in kernels["router"].what
        assert "with float32 results" in kernels["logits"].what


def test_a_refused_number_of_ranks_leaves_the_ops_unknown(tmp_path: Path) -> None:
    plan = planned("--device", "cuda:sm90,count=3", *model(tmp_path, LLAMA), "--tp-size", "3")
    assert "tp_size" in [refusal.what for refusal in plan.refusals]
    assert find(plan, "ops").because.endswith("tp_size does not divide the model")


def test_stored_types_have_the_names_of_the_layers(tmp_path: Path) -> None:
    names = ("language_model.model.layers.0.mlp.up_proj.weight", "vision_tower.patches.weight")
    save_file({name: torch.zeros(1, dtype=torch.int8) for name in names}, tmp_path / "model.safetensors")
    facts = planned("--device", "cpu:avx512", *model(tmp_path, LLAMA)).model
    assert facts is not None
    part = replace(facts, format="safetensors", text_part_of="LlavaForConditionalGeneration")
    assert list(checkpoint_tensors(part).types) == ["model.layers.0.mlp.up_proj.weight"]
    tensors = {"transformer.h.0.mlp.dense_h_to_4h.weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    bloom = replace(facts, format="safetensors", architecture="BloomForCausalLM")
    assert list(checkpoint_tensors(bloom).types) == ["model.layers.0.mlp.up_proj.weight"]


def test_without_a_package_the_slower_path_is_shown_with_its_reason(tmp_path: Path) -> None:
    plan = planned("--device", "cuda:sm90", *model(tmp_path, LLAMA))
    bare = DeviceFacts("sm90", 80 << 30, 1, versions={"torch": "2.13"})
    norm = "rms_norm bfloat16 dim=64"
    kernels = check_launch(plan.target._replace(device=bare), plan.model, plan.resolved).kernels.kernels
    kernel = next(kernel for kernel in kernels if kernel.key == norm)
    assert (kernel.name, kernel.slower) == ("torch (reference)", "triton: the package triton is not installed")
    assert find(plan, norm).slower == ""


@pytest.mark.parametrize("device", ["cuda:sm80", "cuda:sm90", "rocm:gfx942", "xpu:pvc"])
def test_experts_in_fp8_have_a_kernel_on_every_gpu(tmp_path: Path, device: str) -> None:
    arguments = ["--device", device, *model(tmp_path, QWEN3_MOE_FP8)]
    plan = planned(*arguments)
    (experts,) = (kernel for kernel in plan.kernels.kernels if kernel.key.startswith("experts_fp8 "))
    assert (experts.name, experts.slower, plan.refusals) == ("triton", "", ())
    assert "torch_native" in dict(experts.rejected)
    assert planned(*arguments, "--moe-runner-backend", "triton").refusals == ()


def without_triton(text: str | None, source: str) -> Target:
    target = find_target(text, source)
    return target._replace(device=replace(target.device, versions={"torch": "2.13"}))


@pytest.mark.parametrize(
    ("quant_config", "op", "named"),
    [
        (QWEN3_MOE_FP8["quantization_config"], "linear_fp8", "--fp8-gemm-backend torch_native"),
        ({"quant_method": "w8a8_int8"}, "linear_w8a8", "--quantization w8a8_int8"),
    ],
)
def test_the_reference_multiplies_quantized_matrices_only_if_it_was_named(
    tmp_path: Path, quant_config: dict[str, Any], op: str, named: str
) -> None:
    def planned_products(*more: str) -> tuple[set[str | None], set[tuple[str, bool]]]:
        words = ("--device", "cuda:sm90", *model(tmp_path, {**QWEN3, "quantization_config": quant_config}), *more)
        plan = make_plan(user_input(words), without_triton)
        names = {kernel.what: kernel.name for kernel in plan.kernels.kernels if kernel.key.partition(" ")[0] == op}
        refusals = {(refusal.code, named in refusal.remedy) for refusal in plan.refusals if refusal.what in names}
        return set(names.values()), refusals

    assert planned_products() == ({"torch (reference)"}, {("slower_path", True)})
    assert planned_products(*named.split()) == ({"torch (reference)"}, set())


def test_a_method_that_quantizes_at_load_asks_for_its_reference(tmp_path: Path) -> None:
    """By either argument: neither states an implementation that a launch would refuse."""
    asked = {
        ("--quantization", "w8a8_int8"): "linear_w8a8",
        ("--torchao-config", "int8dq"): "linear_w8a8",
        ("--quantization", "fp8"): "linear_fp8",
    }
    for named, op in asked.items():
        plan = make_plan(user_input(("--device", "cuda:sm90", *model(tmp_path, QWEN3), *named)), without_triton)
        names = {kernel.name for kernel in plan.kernels.kernels if kernel.key.startswith(f"{op} ")}
        assert (names, plan.refusals) == ({"torch (reference)"}, ())
    plan = planned("--device", "cpu:avx512", *model(tmp_path, QWEN3), "--quantization", "fp8", "--dtype", "float16")
    assert plan.refusals == ()


def test_int8_experts_with_biases_are_refused_as_by_their_layers(tmp_path: Path) -> None:
    """gpt-oss; whatever else a mixed scheme quantizes to int8, its experts may be in FP8."""
    mixture = {
        **LLAMA,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    int8, floats = mixed_weights.of_int8(), mixed_weights.of_floats()
    schemes = {
        "experts with biases cannot be int8": {"quant_method": "w8a8_int8"},
        "": mixed_weights.config_of({("re:.*self_attn.*",): int8, ("re:.*experts.*",): floats}),
    }
    for reason, quant_config in schemes.items():
        words = model(tmp_path, {**mixture, "quantization_config": quant_config})
        refused = [
            refusal
            for refusal in planned("--device", "cuda:sm90", *words).refusals
            if "experts" in (refusal.what or "")
        ]
        assert [refusal.reason for refusal in refused] == ([reason] if reason else [])


def test_the_reference_computes_quantized_experts_only_if_it_was_named(tmp_path: Path) -> None:
    def planned_experts(config: dict[str, Any], *more: str) -> tuple[Kernel, list[str]]:
        plan = make_plan(user_input(("--device", "cuda:sm90", *model(tmp_path, config), *more)), without_triton)
        kernels = plan.kernels.kernels
        (experts,) = (kernel for kernel in kernels if kernel.key.partition(" ")[0] in ("experts", "experts_fp8"))
        return experts, [refusal.code for refusal in plan.refusals if refusal.what == experts.what]

    missing = "triton: the package triton is not installed"
    experts, codes = planned_experts(QWEN3_MOE_FP8)
    assert (experts.name, missing in experts.slower, codes) == ("torch_native", True, ["slower_path"])
    experts, codes = planned_experts(QWEN3_MOE_FP8, "--moe-runner-backend", "torch_native")
    assert (experts.name, experts.slower, codes) == ("torch_native", "", [])
    unquantized = {name: value for name, value in QWEN3_MOE_FP8.items() if name != "quantization_config"}
    experts, codes = planned_experts(unquantized)
    assert (experts.name, missing in experts.slower, codes) == ("torch_native", True, [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_processor_s_specs_choose_what_its_ops_bind(dtype: str) -> None:
    from srv.platform.manifest import EngineContext, ProbeContext

    cpu = find_platforms()["cpu"].loaded
    device = cpu.probe(ProbeContext(60)).device
    assert device is not None
    ops = Ops("cpu", cpu.create(EngineContext(device, 0)).ops)
    sizes = {"dim": 64, "inputs": 64, "outputs": 64, "head_dim": 64, "rotary_dim": 64}
    names = {spec.op for spec in cpu.facts.ops if spec.target}
    chosen = {op: choose_op([s for s in cpu.facts.ops if s.target], device, op, OpCall(dtype, sizes)) for op in names}
    bound = {op: ops.name_of(op, OpArgs(getattr(torch, dtype), sizes)) for op in names}
    assert bound == {op: choice.spec.name if choice.spec else "" for op, choice in chosen.items()}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (LLAMA, ()),
        (QWEN3, ("--dtype", "float32", "--kv-cache-dtype", "float16")),
        (GEMMA3, ("--attention-backend", "torch_native")),
        (LLAMA, ("--dtype", "float16")),
        (QWEN3, ("--torchao-config", "int8dq")),
        (LLAMA, ("--torchao-config", "int8wo", "--enable-deterministic-inference")),
        (STABLELM, ()),
        (BLOOM, ()),
        (QWEN3_NEXT, ()),
        (QWEN3_5_MOE, ()),
        (LFM2, ("--torchao-config", "int8dq")),
        (LFM2_MOE, ()),
        (GRANITE_HYBRID, ()),
        (GRANITE_DENSE, ()),
        (BAMBA, ()),
        (FALCON_H1, ()),
        (MINIMAX, ()),
        (LFM3, ("--torchao-config", "int8dq")),
        (RECURRENT_GEMMA, ()),
        (OLMO_HYBRID, ()),
        (APERTUS, ()),
        (NEMOTRON, ()),
        (DEEPSEEK, ()),
        (GLM_DSA, ()),
        (AXK2, ()),
        (HY_V4, ()),
        (UNKNOWN, ()),
    ],
    ids=[
        "llama",
        "qwen3-float32",
        "gemma3",
        "llama-float16",
        "qwen3-int8dq",
        "llama-int8wo",
        "stablelm",
        "bloom",
        "qwen3-next",
        "qwen3.5-moe",
        "lfm2-int8dq",
        "lfm2-moe",
        "granite-hybrid",
        "granite-hybrid-dense",
        "bamba",
        "falcon-h1",
        "minimax",
        "lfm3-int8dq",
        "recurrent-gemma",
        "olmo-hybrid",
        "apertus",
        "nemotron",
        "deepseek",
        "glm-moe-dsa",
        "axk2",
        "hy-v4",
        "transformers",
    ],
)
def test_an_engine_runs_what_was_planned(tmp_path: Path, config: dict[str, Any], more: Sequence[str]) -> None:
    arguments = [
        "--device",
        "cpu",
        *model(tmp_path, config),
        "--max-running-requests",
        "2",
        "--max-total-tokens",
        "256",
    ]
    with LocalEngine.launch([*arguments, *more]) as engine:
        plan, running = engine.context.kernels, engine.ready.kernels
        assert {kernel.key: kernel.name for kernel in plan.kernels} == running
        assert plan.differences(running) == {}
    again = planned(*arguments, *more)
    assert again.kernels.kernels == plan.kernels


def test_the_demo_model_s_quantized_weights_run_as_planned() -> None:
    with LocalEngine.launch(["--device", "cpu", "--disable-graphs", "--max-total-tokens", "256"]) as engine:
        plan, running = engine.context.kernels, engine.ready.kernels
    assert {kernel.key: kernel.name for kernel in plan.kernels} == running
    assert running["weights"] == "gguf"


def test_experts_whose_inputs_are_in_another_order_run_as_planned(tmp_path: Path) -> None:
    """A layer around them turns the inputs, which no plan names."""
    write_packed(tmp_path, FORMS["gptq in another order"], kind="qwen3_moe", moe_intermediate_size=64)
    arguments = ["--device", "cpu", "--model-path", str(tmp_path), "--max-total-tokens", "256"]
    with LocalEngine.launch([*arguments, "--disable-graphs"]) as engine:
        plan, running = engine.context.kernels, engine.ready.kernels
    assert {kernel.key: kernel.name for kernel in plan.kernels} == running


def test_what_runs_instead_is_a_slow_path_of_its_own(tmp_path: Path) -> None:
    plan = planned("--device", "cpu:avx512", *model(tmp_path, LLAMA)).kernels
    running = {kernel.key: kernel.name or "" for kernel in plan.kernels} | {"sampling": "another"}
    assert plan.slow_paths(running) == {"sampling": "pytorch was planned, and another runs"}
    shown = {fields["key"]: fields["running"] for fields in plan.to_dicts(running)}
    assert shown == running


def test_steps_that_no_graph_covers_are_counted_by_their_reason(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", *model(tmp_path, LLAMA), "--max-running-requests", "4", "--max-total-tokens", "512"]
    with LocalEngine.launch([*arguments, "--graph-batch-sizes", "1", "3", "--disable-graph-padding"]) as engine:
        if not engine.ready.graph_rows:
            pytest.skip("needs the native kernels, which graphs are made of")

        def slow(rows: int) -> dict[str, int]:
            before = engine.stats().slow_steps
            sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            engine.generate(
                RequestSpec(id=f"{rows}-{number}", tokens=(5 + rows, 7 + number), params=sampling)
                for number in range(rows)
            )
            return {name: count - before.get(name, 0) for name, count in engine.stats().slow_steps.items()}

        alone, two, four = slow(1), slow(2), slow(4)
    assert not any(alone.values())
    assert two["row_count_not_captured"] >= 4
    assert four["more_rows_than_captured"] >= 4
    assert {*two, *four} <= set(get_args(SlowReason))


def test_slower_paths_are_a_metric_with_their_reasons() -> None:
    counts = dict.fromkeys(Stats.__struct_fields__, 0)
    stats = Stats(
        **{**counts, "steps": 9, "slow_steps": {"more_rows_than_captured": 2}, "hooks_switched_off": {}, "inert": {}}
    )
    text = Metrics("m", {"layers": "hidden_act = 'gelu'"}).expose(stats, True).decode()
    assert 'srv_slow_path_steps_total{path="layers",reason="hidden_act = \'gelu\'"} 9.0' in text
    assert 'srv_slow_path_steps_total{path="graphs",reason="more_rows_than_captured"} 2.0' in text


@pytest.mark.slow  # each plan of a class of transformers takes a process
def test_layers_of_transformers_are_refused_where_native_ones_are_named(tmp_path: Path) -> None:
    unknown = ["--device", "cpu:avx512", *model(tmp_path, UNKNOWN)]
    layers = find(planned(*unknown), "layers")
    assert (layers.name, layers.slower) == ("transformers", "hidden_act = 'gelu' is not implemented natively")
    assert find(planned(*unknown, "--model-impl", "transformers"), "layers").slower == ""
    assert refused([*unknown, "--model-impl", "srv"]) == [("unsupported_config", "model_path")]
    demo = ["--device", "cpu:avx512", "--model-impl", "transformers"]
    assert find(planned(*demo), "weights").name == "dequantized at load"
    assert refused([*demo, "--no-dequantize-weights"]) == [("slower_path", "dequantize_weights")]


def test_a_slower_backend_is_refused_where_the_fast_one_is_named(tmp_path: Path) -> None:
    named = ["--device", "cpu:avx512", *model(tmp_path, LLAMA), "--dtype", "float16", "--attention-backend"]
    assert refused([*named, "native"]) == [("backend_unfit", "attention_backend")]
    assert find(planned(*named, "torch_native"), "attention decode group=0").slower == ""
    assert "float16" in find(planned(*named[:-1]), "attention decode group=0").slower


def test_a_plan_refuses_an_op_that_nothing_computes_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    plan = planned("--device", "toy:toy1", *model(tmp_path, LLAMA))

    def with_ops(*ops: OpSpec) -> tuple[Kernel, ...]:
        manifest = plan.target.manifest
        changed = replace(manifest, facts=replace(manifest.facts, ops=ops))
        result = check_launch(plan.target._replace(manifest=changed), plan.model, plan.resolved)
        rejections.extend(refusal.what for refusal in result.refusals)
        return result.kernels.kernels

    rejections: list[str] = []
    unknown = [kernel for kernel in with_ops() if kernel.part == "op"]
    assert [(kernel.name, rejections) for kernel in unknown] == [(None, [])]
    assert "platform toy does not declare its ops" in unknown[0].because
    with_ops(*(spec for spec in plan.target.manifest.facts.ops if spec.op != "rotary"))
    assert rejections == ["rotary in bfloat16, head_dim 32, rotary_dim 32"]


def test_the_command_prints_the_plan_within_80_columns_and_without_torch(tmp_path: Path) -> None:
    script = "import sys; from srv.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    arguments = ["plan", "--device", "npu:a3", *model(tmp_path, LLAMA | {"head_dim": 64}), "--kernels"]
    process = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    *lines, loaded = process.stdout.splitlines()
    assert loaded == "False"
    assert max(map(len, lines)) <= 80
    assert "    = torch_npu (npu_rms_norm), because it is the only implementation that" in lines
    assert "[attention, per kind of layer]" in lines
