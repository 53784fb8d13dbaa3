"""Gemma 3: logits and parameters are those of transformers, in layers of both kinds and over several windows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, make_small, messages
from every import every
from gguf import GGMLQuantizationType as Kind
from models_reference_ops import reference_impls
from models_small import (
    HOST,
    SIZES,
    built,
    edit_config,
    expected_logits,
    our_logits,
    small_model,
    tokens_of,
    write_gguf,
)
from planned_sizes import check_sizes
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from srv.errors import ModelError
from srv.models import derive
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.blueprint import Attention, Part
from srv.models.families.registry import class_of_type
from srv.models.families.trees import native_tree
from srv.models.layers.context import BuildContext
from srv.models.layers.norm import UnitOffsetRMSNorm
from srv.models.modules.decoder import Decoder
from srv.models.read import read_facts
from srv.models.transformers.hf_check import DenseCache
from srv.models.transformers.hf_model import HFModel
from srv.models.unsupported import InvalidConfig, UnsupportedConfig
from srv.platform.interface import OpArgs
from srv.platform.ops import Ops

NAME = "Gemma3ForCausalLM"
TOKENS = 60  # twelve windows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FULL, LOCAL = {"rope_type": "default", "rope_theta": 900.0}, {"rope_type": "default", "rope_theta": 70.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(**full: Any) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": {**FULL, **full}, "sliding_attention": LOCAL}}


CASES: dict[str, dict[str, Any]] = {
    "every sixth layer is full": {"num_hidden_layers": 7},
    "pattern": {"num_hidden_layers": 5, "sliding_window_pattern": 2, **rope()},
    "layer types": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], **rope()},
    "all full": {"layer_types": ["full_attention"] * 3},
    "linear scaling of full layers": {"sliding_window_pattern": 2, **rope(**LINEAR)},
    "llama3 scaling": {"sliding_window_pattern": 2, **rope(**LLAMA3, original_max_position_embeddings=32)},
    "wide heads, own scale, biases": {
        "head_dim": 16,
        "query_pre_attn_scalar": 11,
        "attention_bias": True,
        "sliding_window_pattern": 2,
    },
    "untied, no groups": {"tie_word_embeddings": False, "num_key_value_heads": 6, "rms_norm_eps": 1e-3},
}


def saved(folder: Path, **fields: Any) -> Any:
    model = small_model("gemma3", **fields)
    model.save_pretrained(folder)
    return model


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@every("case", CASES)
def test_native_logits_and_parameter_counts_equal_transformers(case: str, tmp_path: Path) -> None:
    model = saved(tmp_path, **CASES[case])
    tokens = tokens_of(model, TOKENS)
    ours = built(tmp_path, impl="srv")
    assert isinstance(ours, Decoder)
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    assert relative(our_logits(ours, tokens, first=23), expected) < 1e-5
    facts = read_facts(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert derive.parameters(native_tree(facts.architecture, facts.config)) == counted == facts.parameters
    check_sizes(tmp_path, ours)
    windows = tuple(5 if kind == "sliding_attention" else None for kind in model.config.layer_types)
    assert tuple(layer.attention.layer.window for layer in ours.stack) == windows
    assert _windows(native_tree(facts.architecture, facts.config)) == list(windows)


def test_windows_rotary_tables_and_the_scale_change_the_logits(tmp_path: Path) -> None:
    """No two of these models have the same logits, though their weights are the same."""
    changes: list[dict[str, Any]] = [
        rope(),
        rope(rope_theta=901.5),
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": FULL}},
        rope(**LINEAR),
        {**rope(), "sliding_window": 6},
        {**rope(), "query_pre_attn_scalar": 9},
    ]
    seen: list[torch.Tensor] = []
    for index, fields in enumerate(changes):
        model = saved(tmp_path / str(index), sliding_window_pattern=2, **fields)
        seen.append(our_logits(built(tmp_path / str(index)), tokens_of(model, TOKENS)))
    for index, logits in enumerate(seen):
        assert all((logits - other).abs().max() > 1e-3 for other in seen[:index])


@every("scaling", [None, {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}])
def test_fields_before_transformers_5(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """Checkpoints on the hub have `rope_theta`, `rope_local_base_freq`, and a pattern in place of `layer_types`."""
    model = saved(tmp_path, sliding_window_pattern=2, **rope(**(LINEAR if scaling else {})))
    edit_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=FULL["rope_theta"],
        rope_local_base_freq=LOCAL["rope_theta"],
        rope_scaling=scaling,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=2,
    )
    tokens = tokens_of(model, TOKENS)
    assert relative(our_logits(built(tmp_path, impl="srv"), tokens), expected_logits(model, tokens)) < 1e-5


def low_precision(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    cache = DenseCache()
    cache.rows = (("a", 0, len(tokens)),)
    with torch.inference_mode():
        return model.logits(model(ModelInputs(tokens, torch.arange(len(tokens))), ForwardContext(cache.attend))).float()


def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path, sliding_window_pattern=2, initializer_range=0.1)
    tokens = tokens_of(model, TOKENS)
    exact = expected_logits(model, tokens)
    ours = built(tmp_path, impl="srv", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    theirs = relative(expected_logits(model.to(torch.bfloat16), tokens).float(), exact)
    assert relative(low_precision(ours, tokens), exact) < 1.3 * theirs


@every(("dtype", "wide_ops"), [(dtype, wide) for dtype in DTYPES for wide in (True, False)])
def test_norms_equal_those_of_transformers(dtype: torch.dtype, wide_ops: bool) -> None:
    """The weights are near zero: 1 + weight would lose most of their bits. Some platforms have 16-bit ops only."""

    def fits(args: OpArgs) -> str | None:
        return None if wide_ops or args.dtype == dtype else "it is wider than the model"

    context = BuildContext(HOST, dtype, Ops("reference", [replace(op, supports_args=fits) for op in reference_impls()]))
    ours, theirs = UnitOffsetRMSNorm(context, 48, 1e-6), Gemma3RMSNorm(48, 1e-6).to(dtype)
    generator = torch.Generator().manual_seed(2)
    for weight in (ours.weight, theirs.weight):
        weight.data.copy_(torch.randn(48, generator=generator.manual_seed(2)) * 0.01)
    ours.prepare_loaded()
    x, residual = (torch.randn(9, 48, generator=generator).to(dtype) for _ in range(2))
    with torch.no_grad():
        normed, total = ours.add_and_norm(x, residual)
        assert torch.equal(total, residual + x)
        for got, expected in ((normed, theirs(residual + x)), (ours.forward(x), theirs(x))):
            assert got.dtype == dtype
            torch.testing.assert_close(got, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)


def test_a_model_may_run_through_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path, sliding_window_pattern=2)
    tokens = tokens_of(model, TOKENS)
    through = built(tmp_path, impl="transformers")
    assert isinstance(through, HFModel)
    assert relative(our_logits(through, tokens), expected_logits(model, tokens)) < 1e-5
    windows = [layer.window for layer in through.attention_layers]
    assert windows == _windows(native_tree(NAME, read_facts(tmp_path).config)) == [5, None, 5]


SMALL = {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@every(
    ("fields", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "rotary embeddings of only 4 of 8 dimensions"),
        (rope(partial_rotary_factor=0.5), "rotary embeddings of only 4 of 8 dimensions"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0.0"),
        ({"sliding_window": None}, "sliding_window = None of layers of sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has rope_type beside the kinds of layers"),
        (rope(rope_type="longrope", short_factor=[1.0] * 4), "'longrope' of full_attention layers"),
        (rope(rope_type="linear"), "RoPE type 'linear' lacks factor"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    native_tree(NAME, SMALL)
    with pytest.raises((InvalidConfig, UnsupportedConfig), match=re.escape(named)):
        native_tree(NAME, {**SMALL, **fields})


def test_a_refused_field_leads_to_transformers_or_to_an_error(tmp_path: Path) -> None:
    model = saved(tmp_path, final_logit_softcapping=3.0)
    tokens = tokens_of(model)
    assert relative(our_logits(built(tmp_path), tokens), expected_logits(model, tokens)) < 1e-5
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 3\.0"):
        built(tmp_path, impl="srv")


def test_fields_that_a_configuration_leaves_out_have_the_values_of_transformers() -> None:
    """Gemma 3 4B has 3880263168 parameters without its vision part, 2560 wide; Gemma 3 1B has 999885952."""
    four = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "vocab_size": 262208}
    one = {"hidden_size": 1152, "intermediate_size": 6912, "vocab_size": 262144}
    tree = native_tree(NAME, four)
    assert derive.parameters(tree) == 3880263168
    ropes = [
        (part.window, part.rope.theta, part.scale) for part in derive.distinct(tree) if isinstance(part, Attention)
    ]
    assert ropes == [(4096, 1e4, 1 / 16), (None, 1e6, 1 / 16)]
    assert [layer for layer, window in enumerate(_windows(tree)) if window is None] == [5, 11, 17, 23, 29]
    smaller = {**one, "num_attention_heads": 4, "num_key_value_heads": 1}
    assert derive.parameters(native_tree(NAME, smaller)) == 999885952


def test_types_and_end_tokens(tmp_path: Path) -> None:
    """The model type of text models names the class; that of multimodal ones, "gemma3", does not."""
    assert (class_of_type("gemma3_text"), class_of_type("gemma3")) == (NAME, None)
    saved(tmp_path)
    edit_config(tmp_path, architectures=None, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    facts = read_facts(tmp_path)
    assert (facts.architecture, facts.end_tokens) == (NAME, (1,))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert read_facts(tmp_path).end_tokens == (1, 106)


def test_captured_steps_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Prompts are split into chunks, hit the prefix cache, and grow over several windows in replayed steps."""
    one = make_small("gemma3", tmp_path, head_dim=16)
    with engine(one, 16, 16, pool=4096) as served:
        missed, hits = (served.generate(messages(one.prompts)) for _ in range(2))
        assert served.stats().replayed_steps > 0
    assert [result.tokens for result in missed] == [result.tokens for result in hits] == one.tokens
    assert max(result.cached_tokens for result in hits) == 32


def test_captured_steps_in_bfloat16_are_those_of_python(tmp_path: Path) -> None:
    """In bfloat16, norms convert to float32 and back between the native calls."""
    one = make_small("gemma3", tmp_path, head_dim=16)
    outputs: list[list[list[int]]] = []
    for flags in ({}, {"disable_graphs": True}):
        with engine(one, 16, 64, pool=4096, dtype="bfloat16", **flags) as served:
            outputs.append([result.tokens for result in served.generate(messages(one.prompts[-1:]))])
            assert (served.stats().replayed_steps > 0) == (not flags)
    assert outputs[0] == outputs[1]


@every(("kind", "dequantize"), [("F32", True), ("F16", True), ("Q4_K", True), ("Q8_0", False)])
def test_gguf_logits_equal_transformers(kind: str, dequantize: bool, tmp_path: Path) -> None:
    """With the weights of norms stored plus one, and a window in all layers but the sixth."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1, "head_dim": 64}
    model = small_model("gemma3", **wide, query_pre_attn_scalar=64, num_attention_heads=4, num_hidden_layers=7)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "gemma3", Kind[kind])
    tokens, facts = tokens_of(model, TOKENS), read_facts(path)
    assert facts.architecture == NAME
    assert _windows(native_tree(NAME, facts.config)) == [5, 5, 5, 5, 5, None, 5]
    ours = built(path, impl="srv", dequantize=dequantize)
    assert relative(our_logits(ours, tokens), expected_logits(model, tokens)) < 1e-5


def test_gguf_metadata(tmp_path: Path) -> None:
    """Scaling is that of layers with full attention; newer files may have the local base and the pattern."""
    model = small_model("gemma3", sliding_window_pattern=2, **rope(**LINEAR))
    scaling = {"ARCH__rope__scaling__type": "linear", "ARCH__rope__scaling__factor": 4.0}
    more = {"ARCH__rope__freq_base_swa": LOCAL["rope_theta"], "ARCH__attention__sliding_window_pattern": 2.0}
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "gemma3", **scaling, **more)
    tokens = tokens_of(model, TOKENS)
    for impl in ("srv", "transformers"):
        assert relative(our_logits(built(path, impl=impl), tokens), expected_logits(model, tokens)) < 1e-5


def test_gguf_logits_equal_transformers_own_reader(tmp_path: Path) -> None:
    """It takes 256 for `query_pre_attn_scalar`, which is the size of a head in every model but that of 27B."""
    model = small_model("gemma3", head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "gemma3", Kind.F16, tokenizer__ggml__model="llama")
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = tokens_of(model, TOKENS)
    assert relative(our_logits(built(path), tokens), expected_logits(theirs, tokens)) < 1e-5


def test_the_scale_of_27b_is_not_in_its_gguf_file(tmp_path: Path) -> None:
    """As in llama.cpp: 62 layers have the scale of the hidden size per head."""
    small = {"num_hidden_layers": 62, "hidden_size": 12, "intermediate_size": 4, "num_attention_heads": 2}
    model = small_model("gemma3", **small, num_key_value_heads=1)
    write_gguf(tmp_path / "model.gguf", model, "gemma3")
    tree = native_tree(NAME, read_facts(tmp_path / "model.gguf").config)
    assert derive.attention_layers(tree)[0].scale == pytest.approx(6**-0.5)


def _windows(tree: Part) -> list[int | None]:
    return [layer.window for layer in derive.attention_layers(tree)]
