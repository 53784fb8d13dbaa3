"""Values that cannot have an effect beside others: a user's is refused, a default's is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from args_world import CAPABLE, backend, manifest, model, resolved, user
from every import every

from srv.args.prerequisites import with_prerequisite
from srv.errors import Refusal, Rejection
from srv.platform.facts import Default
from srv.specs import FullAttention, ModelFacts, SlidingWindow

GGUF = model(format="gguf", quantization="gguf:Q4_K")
PLAIN_GGUF = model(format="gguf")
WINDOWS = model(cache_groups=(FullAttention((0, 2), 4, 64, 64), SlidingWindow((1, 3), 4, 64, 64, 100)))
ENCODER = model(cache_groups=(FullAttention((), 4, 64, 64),), pooling="mean", generates=False)
POOLED_DECODER = model(pooling="last", generates=False)
ONE_WINDOW = model(cache_groups=(SlidingWindow(tuple(range(10)), 4, 64, 64, 100),))
THREE = tuple(
    replace(spec, traits=("window",)) for spec in (backend("plain"), backend("fast", 20), backend("third", 5))
)


def refusals(facts: ModelFacts, **values: Any) -> dict[str, Rejection]:
    """The refused arguments of a launch on a platform with three attention backends."""
    try:
        resolved(user(**values), manifest(*THREE, capabilities=CAPABLE | {"torch_compile", "fp8_kv"}), model=facts)
    except Refusal as refusal:
        return {rejection.what: rejection for rejection in refusal.rejections}
    return {}


@every(
    ("facts", "values", "argument", "reason"),
    [
        (model(), {"max_prefill_tokens": 256}, "max_prefill_tokens", "chunked_prefill_size"),
        (model(), {"schedule_policy": "lpm", "disable_radix_cache": True}, "schedule_policy", "prefix cache"),
        (model(), {"dequantize_weights": True}, "dequantize_weights", "no weights of /models/tiny are quantized"),
        (PLAIN_GGUF, {"dequantize_weights": True}, "dequantize_weights", "no weights of /models/tiny are quantized"),
        (model(), {"swa_full_tokens_ratio": 0.5}, "swa_full_tokens_ratio", "no layers with a window"),
        (ONE_WINDOW, {"swa_full_tokens_ratio": 0.5}, "swa_full_tokens_ratio", "a pool of their own"),
        (ENCODER, {"max_total_tokens": 10}, "max_total_tokens", "it has no KV pool"),
        (ENCODER, {"page_size": 32}, "page_size", "it has no KV pool"),
        (ENCODER, {"kv_cache_dtype": "float16"}, "kv_cache_dtype", "it has no KV pool"),
        (model(), {"nsa_prefill_backend": "plain"}, "nsa_prefill_backend", "no layer of the model has an indexer"),
        (model(), {"nsa_decode_backend": "flashmla_kv"}, "nsa_decode_backend", "no layer of the model has an indexer"),
        (POOLED_DECODER, {"enable_torch_compile": True}, "enable_torch_compile", "only decode steps are compiled"),
        (
            model(),
            {"disable_hybrid_swa_memory": True},
            "disable_hybrid_swa_memory",
            "no layer of the model has a window",
        ),
        (
            model(),
            {
                "attention_backend": "plain",
                "prefill_attention_backend": "fast",
                "decode_attention_backend": "third",
            },
            "attention_backend",
            "prefill_attention_backend and decode_attention_backend override it",
        ),
    ],
)
def test_a_value_that_can_do_nothing_is_refused(
    facts: ModelFacts, values: dict[str, Any], argument: str, reason: str
) -> None:
    actual = refusals(facts, **values)
    assert list(actual) == [argument]
    assert actual[argument].code == "inert"
    assert reason in actual[argument].reason
    assert actual[argument].remedy.endswith(".")


def test_a_pool_of_8_bit_floats_and_its_scales_are_refused_without_a_pool() -> None:
    for source in ({"quantization_param_path": Path("scales.json")}, {"calculate_kv_scales": True}):
        actual = refusals(ENCODER, kv_cache_dtype="fp8_e4m3", **source)
        assert {name: rejection.code for name, rejection in actual.items()} == dict.fromkeys(
            ("kv_cache_dtype", *source), "inert"
        )
        assert all("it has no KV pool" in rejection.reason for rejection in actual.values())


@every(
    ("facts", "values"),
    [
        (ENCODER, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}),
        (ENCODER, {"kv_cache_dtype": "auto", "page_size": 1}),
        (model(), {"max_prefill_tokens": 256, "chunked_prefill_size": -1}),
        (model(), {"max_prefill_tokens": 16384}),  # the default asks for nothing
        (model(), {"schedule_policy": "lpm"}),
        (model(), {"schedule_policy": "fcfs", "disable_radix_cache": True}),
        (GGUF, {"dequantize_weights": True}),
        (model(), {"dequantize_weights": False}),
        (WINDOWS, {"swa_full_tokens_ratio": 0.5}),
        (WINDOWS, {"disable_hybrid_swa_memory": True}),
        (model(), {"enable_torch_compile": True}),
        (ONE_WINDOW, {"disable_hybrid_swa_memory": True}),
        (model(), {"attention_backend": "plain", "decode_attention_backend": "fast"}),
        (
            model(),
            dict.fromkeys(("attention_backend", "prefill_attention_backend", "decode_attention_backend"), "plain"),
        ),
    ],
)
def test_a_value_with_an_effect_is_accepted(facts: ModelFacts, values: dict[str, Any]) -> None:
    assert refusals(facts, **values) == {}


def test_defaults_of_a_platform_are_accepted() -> None:
    defaults = (
        Default("max_prefill_tokens", lambda context: 256, "its kernels are made for it"),
        Default("dequantize_weights", lambda context: True, "it has no kernels for blocks"),
        Default("schedule_policy", lambda context: "lpm", "it is quick"),
        Default("disable_radix_cache", lambda context: True, "pages cannot be shared"),
    )
    assert resolved(on=manifest(defaults=defaults)).config.schedule.max_prefill_tokens == 256


def test_another_reason_to_refuse_the_value_replaces_this_one() -> None:
    actual = refusals(model(), swa_full_tokens_ratio=0.5, disable_hybrid_swa_memory=True)
    assert {name: rejection.code for name, rejection in actual.items()} == {
        "swa_full_tokens_ratio": "excluded",
        "disable_hybrid_swa_memory": "inert",
    }


def test_values_that_are_tried_alone_come_with_what_makes_them_effective() -> None:
    assert with_prerequisite("max_prefill_tokens", 256) == {"chunked_prefill_size": -1, "max_prefill_tokens": 256}
    assert with_prerequisite("max_prefill_tokens", 16384) == {"max_prefill_tokens": 16384}
