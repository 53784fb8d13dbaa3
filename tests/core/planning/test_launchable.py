"""What a plan refuses although every argument can be resolved: models and platforms that no launch can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG, manifest, model, resolved, user
from every import every
from published_models import write_models

from srv.errors import Refusal
from srv.models.inspection import ClassRefused, Inspection, inspect_model
from srv.planning.launchable import LaunchCheck, check_launch
from srv.planning.plan import make_plan
from srv.planning.target import Target
from srv.platform.manifest import Manifest
from srv.platform.placeholder import PlatformPlaceholder
from srv.specs import AttentionLayer, ModelFacts

NATIVE = model(config=CONFIG)
FOREIGN = model(architecture="ImaginedForCausalLM")
CAPPED = AttentionLayer(index=0, heads=8, kv_heads=4, head_dim=64, scale=0.125, soft_cap=50.0)


def never(*asked: object) -> Inspection:
    raise AssertionError("models with native layers need no other process")


def check(facts: ModelFacts | None, answer: Any = never, on: Manifest | None = None, **values: Any) -> LaunchCheck:
    platform = on or manifest()
    resolution = resolved(user(**values), platform, model=facts)
    target = Target(platform, platform.facts.profiles["mk1"], "the test selects it", {})
    return check_launch(target, facts, resolution, answer)


def test_a_model_with_native_layers_is_launched_and_its_files_are_not_checked() -> None:
    result = check(NATIVE)
    assert result.refusals == ()
    assert [sentence.partition(",")[0] for sentence in result.unchecked] == ["the tokenizer"]


@every(
    ("facts", "values", "code"),
    [
        (model(config=CONFIG, quantization="quark"), {}, "unsupported_quantization"),
        (model(config=CONFIG, stored_types={"bfloat16": 9, "F4": 9}), {}, "unsupported_quantization"),
        (FOREIGN, {"model_impl": "srv"}, "unsupported_config"),
        (FOREIGN, {"torchao_config": "int8wo"}, "unsupported_quantization"),
        (model(config={"hidden_size": "x"}), {}, "unsupported_config"),
    ],
)
def test_models_that_cannot_be_built(facts: ModelFacts, values: dict[str, Any], code: str) -> None:
    platform = manifest(capabilities=manifest().facts.capabilities(None) | {"int8_weights"})  # type: ignore[arg-type]
    (refused,) = check(facts, on=platform, **values).refusals
    assert (refused.code, refused.what) == (code, "model_path")
    assert refused.remedy.endswith(".")


def test_answers_of_transformers() -> None:
    refused = ClassRefused("unsupported_architecture", "Imagined", "it has no such class", "Serve another model")
    (rejection,) = check(FOREIGN, lambda *asked: Inspection(refused=refused)).refusals
    assert (rejection.code, rejection.reason) == ("unsupported_architecture", "Imagined: it has no such class")
    (rejection,) = check(FOREIGN, lambda *asked: Inspection(layers=(CAPPED,))).refusals
    assert (rejection.code, rejection.what, rejection.value) == ("layers_unsupported", "attention_backend", "plain")
    assert "a soft cap of 50.0" in rejection.reason
    unknown = check(FOREIGN, lambda *asked: Inspection(unknown="there is no torch"))
    assert unknown.refusals == ()
    assert unknown.unchecked[-1] == ("whether the class of ImaginedForCausalLM in transformers fits: there is no torch")


@pytest.mark.slow
def test_the_other_process_refuses_a_class_that_transformers_does_not_have() -> None:
    answer = inspect_model(model(architecture="ImaginedForCausalLM", config={"model_type": "imagined"}))
    assert answer.refused is not None
    assert answer.refused.code == "unsupported_architecture"
    assert "does not know that type" in answer.refused.reason


def test_a_process_that_does_not_answer_in_time_leaves_it_unchecked() -> None:
    assert inspect_model(FOREIGN, timeout_s=0.01).unknown == "transformers did not build it within 0 s"


def test_a_platform_that_is_only_described_launches_nothing() -> None:
    described = PlatformPlaceholder("imagined", "Imagined Mk 1", "imagined.platform:create")
    backends = {"attention": (described.attention("paper", 1),), "sampling": (described.backend("dice", 1),)}
    (refused,) = check(NATIVE, on=manifest(backends=backends)).refusals
    assert (refused.code, refused.what, refused.value) == ("not_implemented", "device", "imagined")
    assert "cannot compute on them yet" in refused.reason


def test_devices_that_are_too_few_do_not_make_the_division_unknown(tmp_path: Path) -> None:
    """Three ranks divide this model; a plan with one device still shows its ops and its memory."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 6, "num_key_value_heads": 3,
        "hidden_size": 96, "intermediate_size": 192, "vocab_size": 129}))  # fmt: skip
    plan = make_plan(user(model_path=str(tmp_path), load_format="dummy", device="cuda:sm90", tp_size=3))
    assert [refusal.code for refusal in plan.refusals] == ["too_few_devices"]
    assert plan.budget is not None
    assert any(kernel.key.startswith("op ") or "rms_norm" in kernel.what for kernel in plan.kernels.kernels)


def test_a_folder_without_weights_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan = make_plan(user(model_path=str(tmp_path), device="cpu:avx512", load_format="safetensors"))
    assert len(plan.refusals) == 1


def test_a_score_template_that_cannot_be_read_is_refused_before_weights_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "broken.json").write_text("{")
    for name, code in (("missing.json", "not_found"), ("broken.json", "bad_score_template")):
        statements = {"model_path": str(tmp_path), "device": "cpu:avx512", "load_format": "dummy"}
        with pytest.raises(Refusal) as caught:
            make_plan(user(**statements, score_template=str(tmp_path / name)))
        (rejection,) = caught.value.rejections
        assert (rejection.code, rejection.what, rejection.value) == (code, "score_template", str(tmp_path / name))


def test_a_file_whose_name_no_file_can_have_is_refused_like_one_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    statements = {"model_path": str(tmp_path), "device": "cpu:avx512", "load_format": "dummy"}
    for name in ("missing.json", 300 * "a"):
        with pytest.raises(Refusal) as caught:
            make_plan(user(**statements, kv_cache_dtype="fp8_e4m3", quantization_param_path=tmp_path / name))
        (rejection,) = caught.value.rejections
        assert (rejection.code, rejection.what) == ("not_found", "quantization_param_path")


def test_a_plan_shows_what_a_model_without_a_backend_takes(tmp_path: Path) -> None:
    """A launch refuses DeepSeek-V3 as long as no attention backend reads latents; the memory follows all the same."""
    write_models(tmp_path)
    statements = {"device": "cuda:h200", "model_path": str(tmp_path / "deepseek-v3"), "load_format": "dummy"}
    plan = make_plan(user(**statements, attention_backend="flashmla"))
    assert {"backend_unfit", "pool_too_small"} == {refusal.code for refusal in plan.refusals}
    (pool,) = (refusal for refusal in plan.refusals if refusal.code == "pool_too_small")
    assert "68.62 KiB hold 1 tokens of 61 layers of latent attention" in pool.reason  # 61 x 576 numbers of 2 bytes
    # 671.03 G parameters; 2 bytes for those of the embedding, the output layer, routers and kv_b_proj; scales of blocks
    assert "627.87 GiB of weights quantized with fp8" in pool.reason
    assert "sampling_backend" in plan.resolved.backends
