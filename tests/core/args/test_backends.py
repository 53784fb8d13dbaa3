"""Backend selection in resolution: compatibility with the user's values, reasons, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from args_world import CONFIG, backend, device, fits, manifest, model, resolved, unfit, user
from every import every
from published_models import MODELS

from srv.args.statement import UserInput
from srv.errors import PluginError, Refusal, Rejection
from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv.platform.manifest import Manifest
from srv.specs import CacheSpec, FullAttention, Latent, Recurrent, SlidingWindow, StateTensor


def refused(user_input: UserInput | None, platform: Manifest, **arguments: Any) -> tuple[Rejection, ...]:
    with pytest.raises(Refusal) as refusal:
        resolved(user_input, platform, **arguments)
    return refusal.value.rejections


def test_highest_priority_that_fits_is_chosen_and_the_others_have_reasons() -> None:
    platform = manifest(
        backend("slow", 1), backend("good", 5), backend("best", 9, unfit("head_dim 64 is too large", "no sinks"))
    )
    result = resolved(on=platform)
    choice = result.backends["prefill_attention_backend"]
    assert choice.spec.name == "good"
    assert dict(choice.rejected) == {
        "best": ("head_dim 64 is too large", "no sinks"),
        "slow": ("fits, but its priority 1 is not higher than 5",),
    }
    assert result.config.platform.attention_backend == result.config.platform.decode_attention_backend == "good"


STATES = Recurrent((1, 2), (StateTensor("state", (4,), "float32"),))


@every(
    ("group", "architecture", "code", "reason"),
    [
        (
            Latent((1, 2), 32, 8),
            "LlamaForCausalLM",
            "no_backend_fits",
            "it cannot compute layers 1-2: it does not support multi-head latent attention (MLA)",
        ),
        (STATES, "Zamba2ForCausalLM", "recurrent_states", "architecture Zamba2ForCausalLM has no native layers"),
    ],
)
def test_attention_backends_are_not_asked_about_other_cache_groups(
    group: CacheSpec, architecture: str, code: str, reason: str
) -> None:
    """Their checks, of plugins of any age, may read the heads of every group."""
    groups = (FullAttention((0,), 8, 64, 64), group)
    platform = manifest(
        backend("any", 1, lambda context: Requires({"page_size": (context.model.cache_groups[1].kv_heads,)}))
    )
    rejected = refused(None, platform, model=model(architecture=architecture, cache_groups=groups))
    assert rejected[0].code == code
    assert reason in rejected[0].reason


def test_latent_layers_that_no_backend_computes_are_named_once() -> None:
    """Both the cache groups and the layers of a native architecture say it."""
    config = MODELS["deepseek-v3"]
    layers = config["num_hidden_layers"]
    sizes = {"heads": config["num_attention_heads"], "kv_heads": 1, "layers": layers}
    groups = (Latent(tuple(range(layers)), 512, 64),)
    about = replace(model(cache_groups=groups), architecture="DeepseekV3ForCausalLM", config=config, **sizes)
    (rejected, *_) = refused(None, manifest(backend("any")), model=about)
    assert rejected.reason == (
        f"any: it cannot compute layers 0-{layers - 1}: it does not support multi-head latent attention (MLA)"
    )


def test_backends_of_latent_attention_are_asked_and_others_passed_over() -> None:
    latent = replace(backend("latent", 1), latent="package.module:Class")
    about = model(cache_groups=(Latent((0, 1), 32, 8),))
    assert (
        resolved(None, manifest(backend("other", 9), latent), model=about).config.platform.attention_backend == "latent"
    )


def test_attention_backends_do_not_see_the_states_of_native_layers() -> None:
    groups = (FullAttention((0,), 8, 64, 64), STATES)
    facts = model(architecture="Qwen3NextForCausalLM", config={"num_experts": 0}, cache_groups=groups)
    platform = manifest(
        backend(
            "any", 1, lambda context: Requires({"page_size": tuple(g.kv_heads for g in context.model.cache_groups)})
        )
    )
    assert resolved(on=platform, model=facts).config.memory.page_size == 8


def test_a_model_of_states_alone_is_refused_with_what_native_layers_lack() -> None:
    config = {"num_experts": 0, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    facts = model(architecture="Qwen3NextForCausalLM", config=config, cache_groups=(STATES,))
    (rejected,) = refused(None, manifest(backend("any")), model=facts)
    assert "no native layers compute them here (layer_types has no layer of full_attention)" in rejected.reason
    assert "conflicting" not in rejected.remedy


def test_backend_for_one_slot_is_chosen_only_there() -> None:
    late = backend("late", 9, lambda context: Requires(slots=("decode_attention_backend",)))
    platform = manifest(late, backend("any", 1))
    platform_args = resolved(on=platform).config.platform
    assert (platform_args.prefill_attention_backend, platform_args.decode_attention_backend) == ("any", "late")
    (rejected,) = refused(user(attention_backend="late"), platform)
    assert (rejected.code, rejected.reason) == ("backend_unfit", "it fits only decode_attention_backend here")


def test_backends_without_a_trait_of_a_layer_are_passed_over() -> None:
    """A window that is not shorter than the context hides nothing. A choice by the user is refused."""
    able = replace(backend("able", 1), traits=("window",))
    platform = manifest(backend("plain", 9), able)
    windowed = (FullAttention((0, 3, 5, 8), 4, 64, 64), SlidingWindow((1, 2, 4, 6, 7, 9), 4, 64, 64, 100))
    result = resolved(on=platform, model=model(cache_groups=windowed, architecture="Imagined"))
    reason = "it cannot compute layers 1-2, 4, 6-7, 9: it does not support a sliding window of 100 tokens"
    assert result.config.platform.attention_backend == "able"
    assert dict(result.backends["prefill_attention_backend"].rejected)["plain"] == (reason,)
    (rejected,) = refused(
        user(attention_backend="plain"), platform, model=model(cache_groups=windowed, architecture="Imagined")
    )
    assert (rejected.code, rejected.reason) == ("backend_unfit", reason)
    everywhere = model(config={"sliding_window": 1000})
    assert resolved(on=platform, model=everywhere).config.platform.attention_backend == "plain"


def test_backend_with_a_requirement_that_the_user_violates_is_skipped() -> None:
    platform = manifest(backend("wide", 9, fits({"page_size": (64, 128)})), backend("any", 1))
    assert resolved(on=platform).config.memory.page_size == 64
    result = resolved(user(page_size=16), platform)
    assert result.config.platform.attention_backend == "any"
    assert dict(result.backends["decode_attention_backend"].rejected)["wide"] == (
        "requires page_size 64 or 128, not 16 (set by command line)",
    )


def test_explicit_choice_that_does_not_fit_is_refused_with_its_reasons() -> None:
    platform = manifest(backend("wide", 9, fits({"page_size": (64,)})), backend("any", 1))
    (rejected,) = refused(user(attention_backend="wide", page_size=16), platform)
    assert (rejected.code, rejected.what, rejected.value) == ("backend_unfit", "attention_backend", "wide")
    assert "requires page_size 64, not 16" in rejected.reason
    assert "any" in rejected.remedy


def test_a_value_that_no_backend_allows_is_what_is_refused() -> None:
    """The user set the page size and no backend, so that the refusal is about the page size."""
    platform = manifest(backend("wide", 9, fits({"page_size": (64,)})), backend("any", 1, fits({"page_size": (32,)})))
    (rejected,) = refused(user(page_size=16), platform)
    assert (rejected.code, rejected.what, rejected.value) == ("no_backend_fits", "page_size", "16")
    assert rejected.who == "command line"
    assert "wide requires page_size 64; any requires page_size 32" in rejected.reason
    assert rejected.remedy == "Leave --page-size out, or set it to 64 or 32."


def test_refusal_has_the_reasons_of_all_backends_if_none_fits() -> None:
    platform = manifest(backend("a", 2, unfit("no FP8")), backend("b", 1, unfit("no windows")))
    (rejected,) = refused(None, platform)
    assert rejected.code == "no_backend_fits"
    assert "a: no FP8; b: no windows" in rejected.reason


def test_platform_without_a_backend_is_refused() -> None:
    codes = [rejected.code for rejected in refused(None, manifest(backends={}))]
    assert codes == ["no_backend", "no_backend"]  # attention once, sampling once


def test_unknown_backend_names_the_nearest() -> None:
    (rejected,) = refused(user(attention_backend="plian"), manifest())
    assert rejected.remedy == "Did you mean plain? Available backends: plain."


def test_prefill_and_decode_must_use_the_same_kv_order() -> None:
    platform = manifest(backend("a", 9, kv_order="page_token_head"), backend("b", 5, kv_order="page_head_token"))
    chosen = user(prefill_attention_backend="a", decode_attention_backend="b")
    (rejected,) = refused(chosen, platform)
    assert rejected.code == "backends_disagree"
    assert "page_token_head" in rejected.reason
    assert "page_head_token" in rejected.reason


def test_automatic_decode_backend_uses_the_kv_order_of_the_selected_prefill_backend() -> None:
    platform = manifest(
        backend("a", 9, kv_order="page_token_head"),
        backend("b", 5, kv_order="page_head_token"),
        backend("c", 4, kv_order="page_head_token"),
    )
    result = resolved(user(prefill_attention_backend="c"), platform)
    assert result.config.platform.prefill_attention_backend == "c"
    assert result.config.platform.decode_attention_backend == "b"
    assert result.config.platform.attention_backend is None
    assert "same axis order" in dict(result.backends["decode_attention_backend"].rejected)["a"][0]


def test_requirements_of_two_backends_are_intersected() -> None:
    platform = manifest(
        backend("a", 9, fits({"page_size": (16, 32)})),
        backend("b", 5, fits({"page_size": (64, 32)})),
    )
    chosen = user(prefill_attention_backend="a", decode_attention_backend="b")
    assert resolved(chosen, platform).config.memory.page_size == 32
    clash = manifest(backend("a", 9, fits({"page_size": (16,)})), backend("b", 5, fits({"page_size": (64,)})))
    (rejected,) = refused(chosen, clash)
    assert "a requires page_size 16, but b requires page_size 64" in rejected.reason


def test_equal_priority_is_refused_until_the_user_names_one() -> None:
    platform = manifest(backend("left", 5), backend("right", 5))
    (rejected,) = refused(None, platform)
    assert rejected.code == "equal_backends"
    assert "left and right" in rejected.reason
    assert resolved(user(attention_backend="right"), platform).config.platform.attention_backend == "right"


def test_third_party_backend_can_be_chosen() -> None:
    result = resolved(backends={"sampling": (backend("loaded_dice", 99),)})
    assert result.config.platform.sampling_backend == "loaded_dice"


def test_check_can_read_only_the_users_values() -> None:
    read_values: list[Any] = []

    def check(context: ResolutionContext) -> Requires | Unfit:
        read_values.append((context["page_size"], context["port"], context.device.variant, context["dtype"]))
        return Requires()

    resolved(user(page_size=16, dtype="auto"), manifest(backend("curious", check=check)))
    assert set(read_values) == {(16, None, "mk1", None)}


@every(
    ("check", "message"),
    [
        (lambda context: True, "check returned bool"),
        (lambda context: context["nothing"], "reads nothing"),
        (lambda context: 1 // 0, "ZeroDivisionError"),
        (fits({"nothing": (1,)}), "nothing, which is not an argument"),
        (fits({"page_size": (0,)}), "must be at least 1"),
        (fits({"page_size": ()}), "it allows no value of page_size"),
    ],
)
def test_bad_check_is_reported_by_its_owner(check: Any, message: str) -> None:
    with pytest.raises(PluginError, match="attention backend odd") as error:
        resolved(on=manifest(backend("odd", check=check)))
    assert message in str(error.value)


def test_choice_prints_its_reasons() -> None:
    platform = manifest(backend("good", 5), backend("best", 9, unfit("no sinks")))
    assert str(resolved(on=platform).backends["prefill_attention_backend"]) == (
        "prefill_attention_backend = good because it has the highest priority (5) of the backends that fit\n"
        "    not best: no sinks"
    )


def even_heads(context: ResolutionContext) -> Requires | Unfit:
    """A kernel that computes heads in pairs."""
    model = context.model
    if model is None or model.heads % 2 == 0:
        return Requires()
    return Unfit((f"{model.heads} heads ({model.kv_heads} KV heads) are not a multiple of 2",))


TWELVE_HEADS = model(
    heads=12,
    vocab_size=128,
    config={**CONFIG, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4},
)


def test_backends_see_the_heads_of_one_rank() -> None:
    """12 heads on 4 ranks are 3 on each, which the backend cannot compute; on 2 ranks they are 6."""
    platform = manifest(backend("pairs", 9, even_heads))
    four = replace(device(), count=4)
    for ranks in (1, 2):
        assert resolved(user(tp_size=ranks), platform, model=TWELVE_HEADS, device=four).backends
    (rejected,) = refused(user(tp_size=4), platform, model=TWELVE_HEADS, device=four)
    assert (rejected.code, rejected.what) == ("no_backend_fits", "attention backend")
    assert rejected.reason == "pairs: 3 heads (1 KV heads) are not a multiple of 2"
    result = resolved(
        user(tp_size=4), manifest(backend("pairs", 9, even_heads), backend("any", 1)), model=TWELVE_HEADS, device=four
    )
    assert result.config.platform.attention_backend == "any"


def test_a_model_that_cannot_be_divided_is_refused_for_that_alone() -> None:
    platform, eight = manifest(backend("pairs", 9, even_heads)), replace(device(), count=8)
    (rejected,) = refused(user(tp_size=5), platform, model=TWELVE_HEADS, device=eight)
    assert (rejected.code, rejected.what) == ("not_divisible", "tp_size")


@every("name", ["no_such_argument", "triton_attention_num_kv_splits"])
def test_a_spec_may_not_read_what_is_no_argument_of_its_family(name: str) -> None:
    """Attention backends may read the second one; a sampling backend may not."""
    dice = replace(backend("dice"), arguments=(name,))
    with pytest.raises(PluginError) as raised:
        resolved(on=manifest(backends={"attention": (backend("plain"),), "sampling": (dice,)}))
    assert raised.value.member == "sampling backend dice"
    assert raised.value.reason == f"it reads {name}, which is not an argument that sampling backends may read"


def test_a_backend_s_argument_is_refused_once_if_no_chosen_backend_reads_it() -> None:
    reader = replace(backend("reader", 5), arguments=("triton_attention_num_kv_splits",))
    platform = manifest(reader, backend("plain", 9))
    (rejected,) = refused(user(triton_attention_num_kv_splits=3), platform)
    assert (rejected.code, rejected.reason) == ("backend_ignores", "attention backend plain does not read it")
    result = resolved(user(triton_attention_num_kv_splits=3, attention_backend="reader"), platform)
    assert result.config.graphs.triton_attention_num_kv_splits == 3
