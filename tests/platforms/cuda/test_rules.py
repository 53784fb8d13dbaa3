"""The rules of NVIDIA GPUs: requirements of each attention backend, MoE runner backends, speculative decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from every import every
from rules_world import GPT_OSS, LATENT, LLAMA4, default_of, device, fit, model, violations

from srv.args.resolve import resolve
from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import Refusal
from srv.platform.registry import find_platforms
from srv.specs import FullAttention, Latent, ModelFacts
from srv_cuda.attention_specs import NOT_CALLED


def attention(name: str, variant: str, about: ModelFacts | None = None, **user: Any) -> Any:
    """What a backend requires, or why it does not fit."""
    return fit(device("cuda", variant), "cuda", "attention", name, about, **user)


@every(("name", "variants"), list(NOT_CALLED.items()))
def test_kernels_that_are_not_called_are_refused_by_name(name: str, variants: tuple[str, ...]) -> None:
    why = "this version of srv does not call it"
    for variant in ("sm80", "sm90", "sm100"):
        fits = not variants or variant in variants
        expected = why if fits else f"its kernels are for {', '.join(variants)}, not {variant}; {why}"
        assert attention(name, variant, model()) == attention(name, variant) == expected
        with pytest.raises(Refusal, match=why):
            resolved(variant, model(), attention_backend=name)
        assert isinstance(attention("triton", variant, model()), dict)


def test_flashinfer_s_kernels_of_latent_attention_are_not_called() -> None:
    """Its rule would choose them by default only on sm100."""
    missing = "it does not support multi-head latent attention (MLA)"
    assert missing in attention("flashinfer", "sm100", LATENT)
    for variant in ("sm80", "sm90"):
        assert "other kernels compute latent attention" in attention("flashinfer", variant, LATENT)
        for naming in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            assert missing in attention("flashinfer", variant, LATENT, **{naming: "flashinfer"})


def test_kv_pool_in_e5m2_by_backend() -> None:
    refused = "srv gives it no scales of a KV pool of 8-bit floats"
    assert attention("flashinfer", "sm90", model(), kv_cache_dtype="fp8_e5m2") == refused
    assert isinstance(attention("triton", "sm90", model(), kv_cache_dtype="fp8_e5m2"), dict)
    assert isinstance(attention("torch_native", "sm80", model(), kv_cache_dtype="fp8_e4m3"), dict)


@every(
    ("variant", "dtype", "chosen"),
    [
        ("sm80", "fp8_e5m2", "triton"),
        ("sm80", "fp8_e4m3", "torch_native"),
        ("sm90", "fp8_e4m3", "triton"),
        ("sm120", "fp8_e4m3", "triton"),
    ],
)
def test_triton_reads_the_8_bit_floats_that_it_can_convert(variant: str, dtype: str, chosen: str) -> None:
    assert resolved(variant, model(), kv_cache_dtype=dtype).config.platform.attention_backend == chosen
    unfit = "Triton does not convert fp8_e4m3 on sm80; torch_native does"
    answer = attention("triton", variant, model(), kv_cache_dtype=dtype)
    assert answer == ({} if chosen == "triton" else unfit)


@every(("head_dim", "fits"), [(32, False), (64, True), (80, False), (128, True), (256, True)])
def test_flashinfer_supports_certain_head_sizes(head_dim: int, fits: bool) -> None:
    answer = attention("flashinfer", "sm80", model(head_dim=head_dim))
    assert answer == ({} if fits else f"head_dim {head_dim} is not among 64, 128, 256")


def resolved(variant: str, about: ModelFacts, **user: Any) -> Any:
    manifest = find_platforms()["cuda"].loaded
    statements = tuple(UserStatement(name, value, Origin.COMMAND_LINE, "command line") for name, value in user.items())
    on = manifest.facts.profiles[variant]
    return resolve(UserInput(statements), manifest=manifest, device=on, model=about)


@every(
    ("about", "variant", "backend", "page"),
    [
        (model(), "sm80", "flashinfer", 1),
        (model(), "sm86", "flashinfer", 1),
        (model(), "sm90", "flashinfer", 1),
        (model(), "sm100", "flashinfer", 1),
        (model(), "sm120", "flashinfer", 1),
        (model(dtype="float32"), "sm90", "triton", 1),
        (model(head_dim=80), "sm90", "triton", 1),
        (LATENT, "sm80", "triton", 1),
        (LATENT, "sm100", "triton", 1),
    ],
)
def test_best_backend_for_a_model_family_is_chosen(about: Any, variant: str, backend: str, page: int) -> None:
    config = resolved(variant, about).config
    assert (config.platform.attention_backend, config.memory.page_size) == (backend, page)


@every(
    ("about", "why"),
    [(GPT_OSS, "it does not support attention sinks"), (LLAMA4, "it does not support attention within chunks of 8192")],
)
def test_sinks_and_chunks_are_computed_by_triton_alone(about: Any, why: str) -> None:
    assert resolved("sm90", about).config.platform.attention_backend == "triton"
    with pytest.raises(Refusal, match=why):
        resolved("sm90", about, attention_backend="flashinfer")


def test_torch_native_is_used_where_neither_flashinfer_nor_triton_is_installed() -> None:
    manifest, bare = find_platforms()["cuda"].loaded, device("cuda", "sm90", torch="2.13")
    config = resolve(UserInput(), manifest=manifest, device=bare, model=model()).config.platform
    assert (config.attention_backend, config.sampling_backend) == ("torch_native", "pytorch")
    assert "gguf_blocks" not in manifest.facts.capabilities(bare)


def test_backends_without_their_package_are_not_chosen() -> None:
    lacking = device("cuda", "sm90", torch="2.9")
    for family in ("attention", "sampling"):
        answer = fit(lacking, "cuda", family, "flashinfer", model())
        assert answer == "the package flashinfer-python is not installed"
        installed = device("cuda", "sm90", **{"flashinfer-python": "0.6", "flashinfer-jit-cache": "0.6"})
        assert isinstance(fit(installed, "cuda", family, "flashinfer", model()), dict)


def test_allreduce_fusion_is_the_default_of_gpt_oss_on_sm100() -> None:
    newest = device("cuda", "sm100")
    assert default_of("cuda", "enable_allreduce_fusion", newest, GPT_OSS) is True
    assert default_of("cuda", "enable_allreduce_fusion", newest, GPT_OSS, enable_dp_attention=True) is None
    assert default_of("cuda", "enable_allreduce_fusion", newest, model()) is None
    assert default_of("cuda", "enable_allreduce_fusion", device("cuda", "sm90"), GPT_OSS) is None


@every(
    ("values", "about", "codes"),
    [
        ({}, model(), {}),
        ({"moe_runner_backend": "flashinfer_cutlass"}, model(), {}),
        (
            {"moe_runner_backend": "flashinfer_cutlass"},
            model(quantization="fp8"),
            {"moe_runner_backend": "method_unfit"},
        ),
        ({"moe_runner_backend": "flashinfer_cutlass"}, None, {}),
        (
            {"moe_runner_backend": "flashinfer_cutlass", "tp_size": 4, "ep_size": 2},
            model(),
            {"ep_size": "not_divisible"},
        ),
        (
            {"moe_runner_backend": "flashinfer_cutlass", "tp_size": 4, "ep_size": 4},
            model(),
            {},
        ),
        (
            {"speculative_eagle_topk": 2, "page_size": 2, "decode_attention_backend": "triton"},
            model(),
            {"speculative_eagle_topk": "excluded"},
        ),
        ({"speculative_eagle_topk": 2, "page_size": 1, "decode_attention_backend": "triton"}, model(), {}),
        ({"speculative_eagle_topk": 1, "page_size": 64, "decode_attention_backend": "triton"}, model(), {}),
        ({"speculative_eagle_topk": 8, "page_size": 64, "decode_attention_backend": "flashinfer"}, model(), {}),
    ],
)
def test_constraints_of_kernels(values: dict[str, Any], about: Any, codes: dict[str, str]) -> None:
    assert violations("cuda", device("cuda", "sm100"), about, **values) == codes


SPLITS: dict[str, Any] = {"triton_attention_num_kv_splits": 4, "triton_attention_split_tile_size": 256}


@every("argument", SPLITS)
def test_arguments_of_triton_s_attention_are_refused_with_other_backends(argument: str) -> None:
    """Unless one of the two slots has it, which then reads the value."""
    user = {argument: SPLITS[argument]}
    result = resolved("sm90", model(), attention_backend="triton", **user)
    assert argument in result.backends["decode_attention_backend"].spec.arguments
    mixed = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"}
    assert resolved("sm90", model(), **mixed, **user).config.get(argument) == SPLITS[argument]
    with pytest.raises(Refusal) as refused:
        resolved("sm90", model(), attention_backend="flashinfer", **user)
    (rejected,) = refused.value.rejections
    assert (rejected.code, rejected.what) == ("backend_ignores", argument)
    assert rejected.reason == "attention backend flashinfer does not read it"


@every("argument", ("disable_mla_ragged_prefill", "disable_chunked_prefix_cache"))
def test_the_user_says_how_prompts_of_latent_attention_are_computed(argument: str) -> None:
    result = resolved("sm90", replace(LATENT, cache_groups=(Latent((0,), 512, 64),)), **{argument: True})
    assert result.config.get(argument) is True
    assert argument in result.backends["prefill_attention_backend"].spec.arguments


def test_splits_of_latent_attention_have_a_number_and_no_size() -> None:
    name = "triton_attention_num_kv_splits"
    about = replace(LATENT, cache_groups=(Latent((0,), 512, 64),))
    assert attention("triton", "sm90", about, **{name: 4}) == {}
    assert attention("triton", "sm90", about, triton_attention_split_tile_size=256) == (
        "it does not read triton_attention_split_tile_size for latent attention"
    )


def test_deterministic_inference_is_refused_with_the_reason() -> None:
    with pytest.raises(Refusal) as refused:
        resolved("sm90", model(), enable_deterministic_inference=True)
    (rejected,) = refused.value.rejections
    assert rejected.code == "capability_missing"
    assert "batch_invariant on this device: matrix products are PyTorch's" in rejected.reason


def test_only_triton_reads_a_pool_of_int8() -> None:
    result = resolved("sm90", model(), kv_cache_dtype="int8")
    assert result.config.platform.attention_backend == "triton"
    why = "it does not read the scales of an int8 KV pool; triton does"
    for name in ("flashinfer", "torch_native"):
        assert attention(name, "sm90", model(), kv_cache_dtype="int8") == why
    unaligned = model(head_dim=66, cache_groups=(FullAttention((0, 1, 2, 3), 8, 66, 66),))
    assert "scales unaligned" in attention("triton", "sm90", unaligned, kv_cache_dtype="int8")
