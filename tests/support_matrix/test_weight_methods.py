"""Records of native decoders in quantization methods: they are what a launch answers, and their page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from every import every
from matrix_world import evidence

from srv.models.families.registry import built_in_native_names
from srv.platform.manifest import Manifest
from srv.platform.registry import find_platforms
from srv.quantization import registry
from srv.specs import ModelFacts
from srv_matrix import features, weight_methods
from srv_matrix.build import with_evidence
from srv_matrix.checkpoint_forms import METHODS
from srv_matrix.feature_pages import features_of
from srv_matrix.inventory import Inventory
from srv_matrix.judge import model_verdict
from srv_matrix.matrix import Matrix
from srv_matrix.quantized_page import quantized_page
from srv_matrix.records import Record, Status, by_key
from srv_matrix.sample import sample_models
from srv_matrix.weight_methods import QuantizedModel, quantized_models

# Of every kind that methods distinguish: rows in order, fused, or as inputs; experts, with biases, and very many.
SOME = ("LlamaForCausalLM", "GlmForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "Qwen3NextForCausalLM")


def described(names: Sequence[str]) -> list[ModelFacts]:
    contexts = (features._describe(name, sample_models()[0]) for name in names)
    return [context.model for context in contexts if context.model.generates and not context.unsupported]


def records(platform: str, names: Sequence[str]) -> dict[tuple[str, str], Record]:
    """By feature and variant, of a few architectures, and of the common mixture."""
    loaded = find_platforms()[platform].loaded
    contexts = [features.make_variant_context(loaded, variant, sample_models()[0]) for variant in loaded.variants]
    native = [features.DescribedModel(model) for model in described([*names, weight_methods.COMMON])]
    unquantized = {
        (platform, context.variant): tuple(features._models(context, native, sample_models()[0], Inventory()))
        for context in contexts
    }
    judged = features._quantized(contexts, native, unquantized)
    return {(record.feature, record.variant): record for record in judged}


def test_every_native_decoder_is_judged_in_every_method() -> None:
    models = quantized_models(described(built_in_native_names()))
    names = [model.architecture for model in models]
    decoders = ("ForCausalLM", "LMHeadModel", "ChatGLMModel")
    assert {name for name in built_in_native_names() if name.endswith(decoders)} == set(names)
    assert {method for model in models for method in model.forms} == registry.CHECKPOINT_METHODS.keys() - {"gguf"}
    for model in models:
        for method, forms in model.forms.items():
            recognised = {registry.detect(Path(facts.path), facts.config) for _, facts in forms}
            assert recognised == {method}, (model.architecture, method)


@pytest.mark.slow
@every("platform", ["cuda", "npu", "rocm"])
def test_variants_that_share_answers_have_those_of_their_own_launch(platform: str) -> None:
    loaded = find_platforms()[platform].loaded
    judged = records(platform, SOME)
    accepted = {True: 0, False: 0}
    for model in quantized_models(described(SOME)):
        for variant in (loaded.variants[0], loaded.variants[-1]):
            for method in METHODS:
                record = judged[f"model:{model.architecture}/{method}", variant]
                answers = launched(model, method, loaded, variant)
                assert record.status is status(answers), (record, answers)
                accepted[record.status.works] += 1
    assert all(accepted.values())


def launched(model: QuantizedModel, method: str, loaded: Manifest, variant: str) -> list[bool]:
    device = loaded.facts.profiles[variant]
    return [model_verdict(facts, loaded, device).accepted for _, facts in model.forms[method]]


def status(accepted: Sequence[bool]) -> Status:
    return Status.SUPPORTED if all(accepted) else Status.LIMITED if any(accepted) else Status.UNSUPPORTED


def test_a_refusal_has_the_reason_of_the_launch() -> None:
    judged = {feature: record for (feature, _), record in records("cpu", SOME).items()}
    glm, gpt2 = judged["model:GlmForCausalLM/mxfp4"], judged["model:GPT2LMHeadModel/fp8"]
    assert (glm.status, glm.core, glm.declared) == (Status.UNSUPPORTED, Status.UNSUPPORTED, Status.SUPPORTED)
    assert glm.reason.startswith(
        "its weights are quantized with mxfp4, but GlmForCausalLM stores them in another order"
    )
    assert gpt2.reason.endswith("self_attn.query_key_value has its inputs as rows")
    assert judged["model:GPT2LMHeadModel/awq"].status is Status.SUPPORTED
    assert judged["model:GptOssForCausalLM/mxfp4"].status is Status.SUPPORTED  # as it is published


def test_an_architecture_that_is_refused_unquantized_is_refused_in_every_method() -> None:
    judged = records("npu", ["Gemma2ForCausalLM"])
    for method in METHODS:
        record = judged[f"model:Gemma2ForCausalLM/{method}", "a2"]
        assert (record.declared, record.reason_code) == (Status.UNSUPPORTED, "no_backend_fits")
        assert "model:Gemma2ForCausalLM/safetensors" in record.reason


def test_the_page_has_a_table_for_variants_that_agree_and_a_row_for_architectures_that_agree() -> None:
    loaded, feature = find_platforms()["npu"].loaded, "model:LlamaForCausalLM/modelslim"
    judged = by_key(records("npu", SOME[:2]).values())
    ran = evidence(feature, platform="npu", variant="a2")
    shown = Matrix((loaded,), by_key(with_evidence(tuple(judged.values()), [ran])), {})
    page = quantized_page(shown)
    tables = {part.partition("\n")[0]: part.splitlines() for part in page.split("\n## ")[1:]}
    assert list(tables) == ["npu: a2", "npu: a3", "Evidence"]
    for lines in (tables["npu: a2"], tables["npu: a3"]):
        assert " | ".join(["Architecture", *METHODS]) in lines
    row = next(line for line in tables["npu: a2"] if line.startswith("`LlamaForCausalLM`"))
    assert row.count(" | ") == len(METHODS)
    assert row.endswith(" | ✓ e1")
    assert "capability fp8_weights" in page
    alike = quantized_page(Matrix((loaded,), judged, {}))
    assert "\n## npu: a2, a3\n" in alike
    assert any(line.startswith("`LlamaForCausalLM`, `") for line in alike.splitlines())
    assert features_of(shown, "model") == {}
