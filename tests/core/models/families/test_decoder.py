"""The native decoder has the logits of transformers for small random models of every supported architecture."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_reference_ops import reference_impls
from models_small import GRANITE, HOST, SIZES, built, edit_config, expected_logits, our_logits, small_model, tokens_of
from planned_sizes import check_sizes

from srv.errors import ModelError, PluginError
from srv.models import derive
from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import Attention, Output, walk
from srv.models.families.trees import native_tree
from srv.models.modules.decoder import Decoder
from srv.models.read import read_facts
from srv.models.transformers.hf_check import DenseCache
from srv.models.unsupported import UnsupportedConfig
from srv.platform.interface import OpArgs, OpImpl
from srv.platform.ops import Ops

FLOAT32_OP = OpImpl("linear_float32", "torch", lambda args: None, "srv_kernels.reference:linear_float32")
ROPE = {"rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **ROPE}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.2, 1.7, 3.0], "long_factor": [2.0, 3.0, 5.0, 8.0]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_no_groups": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": ("llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "rope_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **ROPE}}),
    "rope_proportional": ("qwen3", {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
    "rope_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE}}),
    "rope_yarn": ("llama", {"rope_parameters": YARN}),
    "rope_yarn_factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.7, "beta_fast": 8}}),
    "rope_yarn_mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}}),
    "rope_yarn_untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "beta_slow": 0.5}}),
    "rope_llama3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, **ROPE}}),
    "rope_longrope": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 16, **ROPE}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_bias_window": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "granite": ("granite", GRANITE),
    "granite_biases": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3_nope_windows": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0, 1], "use_sliding_window": True, "sliding_window": 5, "attention_bias": True},
    ),
    "smollm3_windows": (
        "smollm3",
        {
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "tie_word_embeddings": False,
            "mlp_bias": True,
        },
    ),
}


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, fields = CASES[case]
    model = small_model(kind, **fields)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="srv")
    assert isinstance(ours, Decoder)
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=2e-4, rtol=1e-4)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert derive.parameters(native_tree(facts.architecture, facts.config)) == counted
    check_sizes(tmp_path, ours)


@every("case", ["rope_linear", "rope_yarn", "rope_llama3", "rope_longrope"])
def test_rope_dialect_before_transformers_5(case: str, tmp_path: Path) -> None:
    """`rope_scaling` next to `rope_theta`, with its kind under `type`, has the same meaning."""
    kind, fields = CASES[case]
    model = small_model(kind, **fields)
    model.save_pretrained(tmp_path)
    scaling = dict(fields["rope_parameters"])
    scaling["type"] = scaling.pop("rope_type")
    theta = scaling.pop("rope_theta")
    edit_config(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=theta)
    tokens = tokens_of(model)
    torch.testing.assert_close(
        our_logits(built(tmp_path), tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4
    )


def test_rope_parameters_change_the_logits(tmp_path: Path) -> None:
    """Each variant has an effect: no two of them yield the same logits."""
    seen: list[torch.Tensor] = []
    for case in ("llama", "rope_linear", "rope_yarn", "rope_llama3", "rope_longrope"):
        model = small_model(*CASES[case][:1], **CASES[case][1])
        model.save_pretrained(tmp_path / case)
        seen.append(our_logits(built(tmp_path / case), tokens_of(model)))
    for index, logits in enumerate(seen):
        assert all((logits - other).abs().max() > 1e-2 for other in seen[:index])


def test_attention_layers_have_the_shapes_and_windows_of_the_configuration(tmp_path: Path) -> None:
    kind, fields = CASES["qwen3_bias_window"]
    small_model(kind, **fields).save_pretrained(tmp_path)
    layers = [layer.attention.layer for layer in built(tmp_path).layers]
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert [layer.window for layer in layers] == [6, None, 6]
    assert {(layer.heads, layer.kv_heads, layer.head_dim, layer.scale) for layer in layers} == {(6, 2, 8, 8**-0.5)}


def test_windows_begin_at_a_layer_where_the_configuration_lists_no_types(tmp_path: Path) -> None:
    """Configurations written before transformers 5."""
    kind, fields = CASES["qwen2_window"]
    small_model(kind, **fields).save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=None)
    tree = native_tree("Qwen2ForCausalLM", read_facts(tmp_path).config)
    assert [layer.window for layer in derive.attention_layers(tree)] == [None, 4, 4]


def test_model_is_ready_for_inference(tmp_path: Path) -> None:
    small_model("qwen2").save_pretrained(tmp_path)
    model = built(tmp_path, dtype=torch.bfloat16)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.device for parameter in model.parameters()} == {HOST}


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = small_model("llama", initializer_range=0.1)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    wide = built(tmp_path)
    # Without an op for the sums, as on many devices, and with one.
    narrow = built(tmp_path, dtype=torch.bfloat16)
    with_sums = built(tmp_path, dtype=torch.bfloat16, ops=Ops("small", [*reference_impls(), FLOAT32_OP]))
    exact = our_logits(wide, tokens)
    with torch.inference_mode():
        cache = DenseCache()
        cache.rows = (("a", 0, len(tokens)),)
        hidden = narrow(ModelInputs(tokens, torch.arange(len(tokens))), ForwardContext(cache.attend))
        got, sums = narrow.logits(hidden), with_sums.logits(hidden)
    assert (got.dtype, sums.dtype) == (torch.float32, torch.float32)
    assert torch.equal(got.bfloat16().float(), got)
    assert not torch.equal(sums.bfloat16().float(), sums)
    torch.testing.assert_close(sums.bfloat16().float(), got)
    assert (sums - exact).norm() / exact.norm() < 0.05


def test_a_linear_layer_uses_the_kernel_it_is_given(tmp_path: Path) -> None:
    """A platform's `post_load` relies on this: forward uses `kernel`, and weights are accessible."""
    model = small_model("llama")
    model.save_pretrained(tmp_path)
    ours = built(tmp_path)
    assert isinstance(ours, Decoder)
    tokens = tokens_of(model)
    before = our_logits(ours, tokens)
    repacked = ours.lm_head.weight.t().contiguous()
    ours.lm_head.kernel = lambda x: 2 * (x @ repacked)
    torch.testing.assert_close(our_logits(ours, tokens), 2 * before, atol=1e-3, rtol=1e-4)


@every(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "lacks factor"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ({"logits_scaling": 4.0}, "logits_scaling = 4.0"),
    ],
)
def test_features_without_native_layers_are_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelError, match="unsupported_config") as caught:
        built(tmp_path, impl="srv")
    assert named in str(caught.value)


PARTIAL = {"rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 0.5}}


@every("kind", ["llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"])
def test_a_partial_rotary_factor_has_no_effect_as_in_transformers(kind: str, tmp_path: Path) -> None:
    """transformers ignores it in these classes. The native layers refuse it, so that they run instead, and log it."""
    model = small_model(kind, **PARTIAL)
    model.save_pretrained(tmp_path)
    assert "partial_rotary_factor" in (tmp_path / "config.json").read_text()
    with pytest.raises(ModelError, match=r"rotary embeddings of only 4 of 8 dimensions \(partial_rotary_factor\)"):
        built(tmp_path, impl="srv")
    tokens = tokens_of(model)
    torch.testing.assert_close(
        our_logits(built(tmp_path), tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4
    )


SMALL_SMOLLM3 = {**SIZES, "use_sliding_window": False, "sliding_window": 4}


@every(
    ("name", "fields", "named"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "without a sliding window"),
        ("GraniteForCausalLM", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = [1, 0, 1] is not implemented"),
        ("LlamaForCausalLM", GRANITE, "attention_multiplier = 0.2 is not implemented"),
        ("SmolLM4ForCausalLM", {}, "SmolLM4ForCausalLM has no native layers"),
    ],
)
def test_fields_of_other_architectures_are_refused(name: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(named)):
        native_tree(name, {**SMALL_SMOLLM3, **fields})


def test_fields_that_a_configuration_leaves_out_have_the_values_of_transformers() -> None:
    """SmolLM3-3B has 3075098624 parameters, and every fourth layer is without RoPE."""
    left_out = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008}
    layers = {"num_hidden_layers": 36, "num_attention_heads": 16}
    tree = native_tree("SmolLM3ForCausalLM", {**left_out, **layers})
    output = derive.find(tree, Output)
    assert output is not None
    assert (derive.parameters(tree), output.tied) == (3075098624, True)
    ropes = [part.rope for _, part in walk(tree) if isinstance(part, Attention)]
    assert {None if rope is None else rope.theta for rope in ropes} == {None, 2e6}
    assert [index for index, rope in enumerate(ropes) if rope is None] == list(range(3, 36, 4))


def test_automatic_choice_falls_back_to_transformers_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model("llama", hidden_act="gelu")
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    with caplog.at_level("INFO", logger="srv.models.build"):
        ours = built(tmp_path)
    assert "through transformers: hidden_act = 'gelu'" in caplog.text
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


def test_ops_are_bound_with_the_sizes_of_the_model(tmp_path: Path) -> None:
    """Implementations are selected by dtype and sizes, for each op that the layers call."""
    small_model("qwen3").save_pretrained(tmp_path)
    asked: set[tuple[str, torch.dtype, tuple[tuple[str, int], ...]]] = set()

    def noting(impl: OpImpl) -> OpImpl:
        def supports(args: OpArgs) -> None:
            asked.add((impl.op, args.dtype, tuple(sorted(args.sizes.items()))))

        return replace(impl, supports_args=supports)

    built(tmp_path, dtype=torch.bfloat16, ops=Ops("reference", [noting(impl) for impl in reference_impls()]))
    assert asked == {
        ("rms_norm", torch.bfloat16, (("dim", 48),)),
        ("rms_norm", torch.bfloat16, (("dim", 8),)),
        ("add_rms_norm", torch.bfloat16, (("dim", 48),)),
        ("rotary", torch.bfloat16, (("head_dim", 8), ("rotary_dim", 8))),
        ("silu_and_mul", torch.bfloat16, (("dim", 80),)),
    }


def test_an_op_that_the_platform_lacks_is_named(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    some = [impl for impl in reference_impls() if impl.op != "silu_and_mul"]
    with pytest.raises(PluginError, match="op silu_and_mul"):
        built(tmp_path, ops=Ops("reference", some))
