"""The rules of AMD and Intel GPUs and Ascend NPUs: requirements of their backends, and their own defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from every import every
from rules_world import FACTS, GIB, GPT_OSS, LATENT, LLAMA4, contribution, default_of, device, fit, model, violations

from srv.args.resolve import resolve
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Refusal
from srv.planning.steps import rows_to_capture
from srv.platform.facts import OpCall
from srv.platform.registry import find_platforms
from srv.specs import FullAttention, Latent, ModelFacts, SlidingWindow
from srv_gpu.tools import AITER_MODULES

PROFILES = [(name, profile) for name, facts in FACTS.items() for profile in facts.profiles]
MISTRAL = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "sliding_window": 4096,
}
FAMILIES = {
    "llama": model(),
    "gpt_oss": model("GptOssForCausalLM", quantization="mxfp4"),
    "llama4": LLAMA4,
    "gemma": model("Gemma3ForCausalLM", head_dim=256, config={"sliding_window_pattern": 1}),  # no windows
    "deepseek": LATENT,
}


NO_LATENTS = "it does not support multi-head latent attention (MLA)"
LONG_HEADS = model(head_dim=128, cache_groups=(FullAttention((0, 1, 2, 3), 8, 128, 128),))


def aiter(about: ModelFacts | None, **user: Any) -> Any:
    return fit(device("rocm", "gfx942"), "rocm", "attention", "aiter", about, **user)


def test_aiter_reads_pages_of_one_token_or_of_16() -> None:
    assert aiter(LONG_HEADS) == {"page_size": (1, 16)}
    assert aiter(None) == {"page_size": (1, 16)}


@every(("heads", "fits"), [(16, True), (128, True), (32, False), (64, False)])
def test_latent_attention_of_aiter_supports_some_head_counts_and_is_not_called(heads: int, fits: bool) -> None:
    answer = aiter(model("DeepseekV3ForCausalLM", config={"kv_lora_rank": 512}, heads=heads))
    counts = f"latent attention needs 16 or 128 heads per rank, not {heads}"
    assert answer == (f"it cannot compute layers 0-3: {NO_LATENTS}" if fits else counts)


def test_aiter_has_no_attention_sinks_and_no_chunks() -> None:
    assert "attention sinks" in aiter(replace(LONG_HEADS, architecture=GPT_OSS.architecture))
    chunked = replace(LONG_HEADS, architecture=LLAMA4.architecture, config=LLAMA4.config)
    assert "attention within chunks of 8192 tokens" in aiter(chunked)


@every(
    ("about", "user", "reason"),
    [
        (model(), {}, "keys of 64 and values of 64 elements are not both 128 or both 256"),
        (replace(LONG_HEADS, heads=256), {}, "32 query heads share a KV head, more than 16"),
        (LONG_HEADS, {"dtype": "float32"}, "dtype float32 is not one of bfloat16, float16"),
        (
            LONG_HEADS,
            {"kv_cache_dtype": "float16"},
            "kv_cache_dtype float16 is not the activations' dtype, bfloat16",
        ),
        (
            replace(LONG_HEADS, architecture="MistralForCausalLM", config=MISTRAL),
            {},
            "it cannot compute layers 0-3: it does not support a sliding window of 4096 tokens",
        ),
    ],
)
def test_limits_of_aiter(about: ModelFacts, user: dict[str, str], reason: str) -> None:
    assert aiter(about, **user) == reason


def test_aiter_is_for_instinct_gpus() -> None:
    on = device("rocm", "gfx1100")
    assert fit(on, "rocm", "attention", "aiter", LONG_HEADS) == "its kernels are for gfx942, gfx950, not gfx1100"


def test_page_size_of_the_user_is_never_changed() -> None:
    manifest = find_platforms()["rocm"].loaded
    for size, backend in ((None, "aiter"), (16, "aiter"), (8, "triton")):
        named = () if size is None else (UserStatement("page_size", size, Origin.COMMAND_LINE, "command line"),)
        on = manifest.facts.profiles["gfx942"]
        config = resolve(UserInput(named), manifest=manifest, device=on, model=LONG_HEADS).config
        assert (config.platform.attention_backend, config.memory.page_size) == (backend, size or 1)


def test_aiter_is_chosen_if_installed() -> None:
    lacking, having = (
        device("rocm", "gfx942", torch="2.9"),
        device("rocm", "gfx942", **{"amd-aiter": "0.1", AITER_MODULES: "9"}),
    )
    assert fit(lacking, "rocm", "attention", "aiter", LONG_HEADS) == "the package amd-aiter is not installed"
    assert isinstance(fit(having, "rocm", "attention", "aiter", LONG_HEADS), dict)


def test_long_contexts_cost_aiter_memory() -> None:
    on = device("rocm", "gfx942")
    used = {"prefill_attention_backend": "aiter", "decode_attention_backend": "aiter"}
    share = 0.15
    assert contribution("rocm", "long_contexts", on, context_length=8193, **used) == pytest.approx(share)
    assert contribution("rocm", "long_contexts", on, context_length=8192, **used) == 0
    assert contribution("rocm", "long_contexts", on, context_length=None, **used) == 0
    used["prefill_attention_backend"] = "triton"
    assert contribution("rocm", "long_contexts", on, context_length=65536, **used) == pytest.approx(share)
    used["decode_attention_backend"] = "triton"
    assert contribution("rocm", "long_contexts", on, context_length=65536, **used) == 0


def test_defaults_of_rocm() -> None:
    on = device("rocm", "gfx950")
    assert default_of("rocm", "triton_attention_num_kv_splits", on) == 16


@every(("platform", "profile"), [("rocm", "gfx942"), ("npu", "a3"), ("xpu", "bmg")])
def test_draft_trees_need_pages_of_one_token(platform: str, profile: str) -> None:
    on = device(platform, profile)
    refused = {"speculative_eagle_topk": "excluded"}
    tree = {"speculative_eagle_topk": 2, "decode_attention_backend": "some"}
    assert violations(platform, on, page_size=16, **tree) == refused
    assert violations(platform, on, page_size=1, **tree) == {}
    assert violations(platform, on, page_size=16, speculative_eagle_topk=1) == {}
    assert violations(platform, on, page_size=16) == {}


@every(
    ("changes", "reason"),
    [
        ({"heads": 256, "kv_heads": 8}, None),
        ({"heads": 257, "kv_heads": 257}, "257 query heads are more than 256"),
        ({"heads": 64, "kv_heads": 1}, None),
        ({"heads": 65, "kv_heads": 1}, "65 query heads share one KV head; at most 64 can"),
        ({"head_dim": 512}, None),
        ({"head_dim": 513}, "head_dim 513 is more than 512"),
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 16"),
        ({"head_dim": 192, "cache_groups": (FullAttention((0,), 8, 192, 128),)}, None),
        (
            {"cache_groups": (FullAttention((0,), 8, 128, 192),)},
            "keys of 128 and values of 192 elements differ in length; only 192 with 128 may",
        ),
        (
            {"cache_groups": (FullAttention((0,), 8, 192, 64),)},
            "keys of 192 and values of 64 elements differ in length; only 192 with 128 may",
        ),
        ({"architecture": "MistralForCausalLM", "config": MISTRAL}, None),
        ({"architecture": "OtherForCausalLM", "config": {"sliding_window": 512}}, None),
        (
            {"head_dim": 192, "cache_groups": (SlidingWindow((0,), 8, 192, 128, 512),)},
            "keys of 192 and values of 128 elements with a sliding window of 512 tokens; only keys and values of equal "
            "length can have one",
        ),
        (
            {"config": {"attn_logit_softcapping": 50.0}},
            "it cannot compute layers 0-3: it does not support a soft cap of 50.0",
        ),
    ],
)
def test_the_fused_attention_of_npus_has_limits(changes: dict[str, int], reason: str | None) -> None:
    answer = fit(device("npu", "a3"), "npu", "attention", "ascend", model(**changes))
    assert answer == (reason or {"page_size": (128,)})


@every(
    ("op", "dtype", "sizes", "reason"),
    [
        ("linear_w8a8", "bfloat16", {"inputs": 65535}, None),
        ("linear_w8a8", "bfloat16", {"inputs": 65536}, "65536 input features are more than the 65535 that"),
        ("linear_w8a8", "float32", {"inputs": 64}, "float32 is not bfloat16 or float16"),
        ("experts", "bfloat16", {"hidden": 65535, "intermediate": 65535, "experts": 1024}, None),
        ("experts", "bfloat16", {"hidden": 65536}, "hidden 65536 is more than the 65535 that npu_grouped_matmul takes"),
        ("experts", "bfloat16", {"intermediate": 65536}, "intermediate 65536 is more than the 65535 that"),
        ("experts", "bfloat16", {"experts": 1025}, "1025 experts are more than the 1024 that"),
        ("experts", "float32", {"experts": 8}, "float32 is not bfloat16 or float16"),
        ("experts_int8", "bfloat16", {"experts": 128}, None),
        ("experts_int8", "bfloat16", {"experts": 129}, "129 experts are more than the 128 that"),
        ("route_experts", "bfloat16", {"experts": 2048}, None),
        ("route_experts", "bfloat16", {"experts": 2049}, "2049 experts are more than the 2048 that"),
    ],
)
def test_the_products_of_npus_have_limits(op: str, dtype: str, sizes: dict[str, int], reason: str | None) -> None:
    spec = next(candidate for candidate in FACTS["npu"].ops if candidate.op == op)
    answer = spec.check(device("npu", "a3"), OpCall(dtype, sizes))
    assert answer is None if reason is None else answer is not None and answer.startswith(reason)


def test_row_count_of_npus_is_limited_if_every_step_is_packed() -> None:
    on, two_lengths = device("npu", "a2"), model(cache_groups=(FullAttention((0,), 8, 192, 128),))
    assert fit(on, "npu", "attention", "ascend", model(), max_running_requests=4097) == {"page_size": (128,)}
    assert fit(on, "npu", "attention", "ascend", two_lengths, max_running_requests=4096) == {"page_size": (128,)}
    assert fit(on, "npu", "attention", "ascend", two_lengths, max_running_requests=4097) == (
        "max_running_requests 4097 is more than the 4096 rows that one call takes for keys of 192 and values of 128 "
        "elements"
    )


@every(
    ("dtype", "user", "reason"),
    [
        ("float32", {}, None),
        ("float16", {"kv_cache_dtype": "float16"}, None),
        ("float32", {"kv_cache_dtype": "bfloat16"}, None),
        ("float16", {"dtype": "bfloat16", "kv_cache_dtype": "auto"}, None),
        ("bfloat16", {"dtype": "float32"}, "dtype float32 is not one of bfloat16, float16"),
        ("float16", {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16 is not the model's dtype, float16"),
    ],
)
def test_the_fused_attention_of_npus_reads_one_type_of_16_bits(
    dtype: str, user: dict[str, str], reason: str | None
) -> None:
    answer = fit(device("npu", "a2"), "npu", "attention", "ascend", model(dtype=dtype), **user)
    assert answer == (reason or {"page_size": (128,)})


@every(
    ("profile", "memory", "chunk", "few", "many"),
    [("a2-32gb", 32, 4096, 16, 64), ("a2", 64, 8192, 64, 256), ("a3", 64, 8192, 64, 256)],
)
def test_npu_defaults_by_the_card_s_memory(profile: str, memory: int, chunk: int, few: int, many: int) -> None:
    on = device("npu", profile)
    assert on.memory_bytes == memory * GIB
    assert default_of("npu", "chunked_prefill_size", on) == chunk
    assert default_of("npu", "graph_max_batch_size", on, disable_graphs=True) is None
    assert default_of("npu", "graph_max_batch_size", on, disable_graphs=False, tp_size=3) == few
    assert default_of("npu", "graph_max_batch_size", on, disable_graphs=False, tp_size=4) == many


def test_intel_s_kernels_are_not_called() -> None:
    for variant in ("pvc", "bmg"):
        on = device("xpu", variant)
        assert fit(on, "xpu", "attention", "intel_xpu", model()) == "this version of srv does not call it"
        for about in (model(), GPT_OSS, LLAMA4):
            assert fit(on, "xpu", "attention", "triton", about) == {}


@every("family", FAMILIES)
@every(("platform", "profile"), PROFILES)
def test_defaults_of_a_model_family_are_never_refused_by_the_platform(platform: str, profile: str, family: str) -> None:
    manifest = find_platforms()[platform].loaded
    device = manifest.facts.profiles[profile]
    latent = any(spec.latent for spec in FACTS[platform].backends["attention"])
    if (family in ("gpt_oss", "llama4") and platform in ("npu", "toy")) or (family == "deepseek" and not latent):
        # Only because no kernel that is called computes their attention.
        with pytest.raises(Refusal) as refused:
            resolve(UserInput(), manifest=manifest, device=device, model=FAMILIES[family])
        no_mxfp4 = family == "gpt_oss"
        unfit = {rejection.what for rejection in refused.value.rejections if rejection.code == "no_backend_fits"}
        assert unfit == ({"attention backend", "moe backend"} if no_mxfp4 else {"attention backend"})
        others = {rejection.what for rejection in refused.value.rejections if rejection.code != "no_backend_fits"}
        assert others == ({"quantization"} if no_mxfp4 else set())
        return
    result = resolve(UserInput(), manifest=manifest, device=device, model=FAMILIES[family])
    assert result.config.model.context_length == 65536


@every(("platform", "profile"), [(on, to) for on, to in PROFILES if on != "xpu"])
def test_the_graphs_that_a_user_lists_may_be_larger_than_the_default(platform: str, profile: str) -> None:
    """XPUs capture no steps."""
    manifest = find_platforms()[platform].loaded
    listed = {"graph_batch_sizes": (2, 700), "max_running_requests": 1000}
    user = UserInput(tuple(UserStatement(name, value, Origin.COMMAND_LINE, name) for name, value in listed.items()))
    config = resolve(user, manifest=manifest, device=manifest.facts.profiles[profile], model=model()).config
    assert rows_to_capture(config) == (2, 700)


@every(("platform", "profile"), PROFILES)
def test_every_rule_has_a_subject_and_a_reason(platform: str, profile: str) -> None:
    facts = FACTS[platform]
    for default in facts.defaults:
        assert default.reason
        assert not default.reason.endswith(".")
    for constraint in facts.constraints:
        assert constraint.code
        assert constraint.remedy.endswith(".")


@every(("experts", "fits"), [(128, True), (129, False)])
def test_npu_s_experts_with_biases_are_limited_in_number(experts: int, fits: bool) -> None:
    """Those of GPT-OSS; experts without biases are limited by the ops."""
    biased = model("GptOssForCausalLM", config={"num_local_experts": experts})
    answer = fit(device("npu", "a3"), "npu", "moe", "ascend", biased)
    assert answer == ({} if fits else "it takes at most 128 experts with biases, and the model has 129")
    plain = model("MixtralForCausalLM", config={"num_local_experts": experts})
    assert fit(device("npu", "a3"), "npu", "moe", "ascend", plain) == {}


DEEPSEEK = {
    **{"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "first_k_dense_replace": 4},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 1000, "max_position_embeddings": 4096},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1},
}


def latent_on_npu(heads: int = 128, running: int = 64, **fields: int) -> object:
    """The answer of "ascend" about DeepSeek-V3 with other sizes, `heads` of which one rank has."""
    config = {**DEEPSEEK, **fields}
    group = Latent((0, 1, 2, 3), config.get("kv_lora_rank", 512), config.get("qk_rope_head_dim", 64))
    about = model("DeepseekV3ForCausalLM", config=config, heads=heads, kv_heads=1, head_dim=192, cache_groups=(group,))
    return fit(device("npu", "a2"), "npu", "attention", "ascend", about, max_running_requests=running)


def test_npu_s_operator_computes_latent_attention_of_deepseek_s_sizes() -> None:
    """And adds heads up to a power of two; what it cannot read is known before a start."""
    for heads in (1, 20, 128):
        assert latent_on_npu(heads) == {"page_size": (128,)}
    assert latent_on_npu(129) == "129 query heads of latent attention are more than 128"
    cached = "latent attention caches {} + {} elements per token; only 512 + 64 can be read"
    assert latent_on_npu(kv_lora_rank=256) == cached.format(256, 64)
    assert latent_on_npu(qk_rope_head_dim=32) == cached.format(512, 32)
    assert latent_on_npu(qk_nope_head_dim=192, v_head_dim=256) == (
        "keys of 192 and values of 256 elements per head of latent attention; only 128 and 128 can be read"
    )
    assert latent_on_npu(running=4096) == {"page_size": (128,)}
    assert latent_on_npu(running=4097) == (
        "max_running_requests 4097 is more than the 4096 rows that one call takes for latent attention"
    )


def test_only_models_that_native_attention_reads_in_int8_are_sent_there() -> None:
    on = device("cpu", "avx512")
    latent = replace(LATENT, cache_groups=(Latent((0,), 512, 64),))
    for about, native, triton in ((model(), "; native does", "; triton does"), (latent, "", "")):
        answer = fit(on, "cpu", "attention", "torch_native", about, kv_cache_dtype="int8")
        assert answer == f"it does not support int8 KV pools{native}"
        gpu = fit(device("cuda", "sm90"), "cuda", "attention", "torch_native", about, kv_cache_dtype="int8")
        assert gpu == f"it does not read the scales of an int8 KV pool{triton}"
