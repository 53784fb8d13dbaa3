"""Models that only transformers implements: with our attention they have the same logits, or they are refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from models_reference_ops import reference_impls
from models_small import SIZES, built, edit_config, expected_logits, our_logits, randomized, small_model, tokens_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from srv.errors import ModelError
from srv.models.base import ForwardContext, ModelInputs
from srv.models.config.layer_fields import ATTENTIONS_PER_LAYER
from srv.models.facts.attention_layers import attention_layers
from srv.models.families.registry import encoder_names
from srv.models.read import read_facts
from srv.models.transformers.hf_attention import FoundLayers, HFForwardPass, PoolHeads, TrialPass, attention
from srv.models.transformers.hf_check import DenseCache, largest_difference
from srv.models.transformers.hf_model import HFModel, check_without_weights
from srv.platform.interface import AttentionLayer, OpImpl
from srv.platform.ops import Ops

PLAIN = {"num_key_value_heads": 6}  # classes that do not share keys between heads
GPT2 = {**PLAIN, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SERVED: dict[str, dict[str, Any]] = {
    "gpt_neox": PLAIN,
    "gpt2": GPT2,
    "phi": PLAIN,
    "phi3": PLAIN,
    "olmo2": {},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0},
    "cohere2": {"sliding_window": 5, "logit_scale": 0.25},
    "starcoder2": {"sliding_window": 5},
    "opt": {**PLAIN, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "mixtral": EXPERTS,
    "biogpt": PLAIN,  # which does not declare that it calls the interface
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "nemotron": {"head_dim": 8},  # which does not hand on keyword arguments to its attention
    "bert": {**PLAIN, "is_decoder": True},  # which computes more after its last norm than an output layer
    "roberta": {**PLAIN, "is_decoder": True},  # whose first position is not 0
    "gpt_oss": {**EXPERTS, "head_dim": 8, "sliding_window": 5},  # which has attention sinks
    "mimo_v2_flash": {  # which has them in layers with a window, whose KV heads are twice as many
        **EXPERTS,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "v_head_dim": 4,
        "sliding_window": 5,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "diffllama": {"head_dim": 8},  # each of whose layers attends twice
    "hrm_text": {**PLAIN, "head_dim": 8, "H_cycles": 2, "L_cycles": 1},  # whose layers are computed in cycles
    "gemma3n_text": {  # whose upper layers attend with the keys and values of lower ones
        "head_dim": 8,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
        "altup_num_inputs": 2,
        "laurel_rank": 4,
    },
    "gemma4_text": {  # whose layers have heads of different sizes
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": 2 * ["sliding_attention", "full_attention"],
    },
}


def saved(kind: str, fields: dict[str, Any], folder: Path) -> Any:
    """A random model of any architecture of transformers, saved to `folder`."""
    config = AutoConfig.for_model(kind, **{**SIZES, "pad_token_id": 0, "num_hidden_layers": 2, **fields})
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", SERVED)
def test_logits_equal_transformers_own_attention(kind: str, tmp_path: Path) -> None:
    model = saved(kind, SERVED[kind], tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="transformers")
    assert isinstance(ours, HFModel)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-3)


def test_attention_layers_are_found_in_the_model(tmp_path: Path) -> None:
    saved("gemma2", SERVED["gemma2"], tmp_path)
    first, second = built(tmp_path, impl="transformers").attention_layers
    assert (first.window, second.window) == (5, None)
    assert (first.soft_cap, first.heads, first.kv_heads, first.head_dim) == (50.0, 6, 2, 8)
    assert first.scale == pytest.approx(8**-0.5)


def test_each_attention_of_a_pass_has_a_cache_of_its_own(tmp_path: Path) -> None:
    for kind, fields, count in (("diffllama", SERVED["diffllama"], 4), ("hrm_text", SERVED["hrm_text"], 8)):
        folder = tmp_path / kind
        saved(kind, fields, folder)
        assert read_facts(folder).layers == count
        assert [layer.index for layer in built(folder).attention_layers] == list(range(count))
    edit_config(folder, num_hidden_layers=2, num_layers_per_stack=None)  # before transformers has counted
    assert read_facts(folder).layers == 8
    edit_config(folder, H_cycles=10**9)
    with pytest.raises(ModelError, match=r"gives 2 for its layers .*, and each attends 2000000000 times"):
        read_facts(folder)


def test_attentions_that_the_configuration_does_not_count_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("diffllama", SERVED["diffllama"], tmp_path)
    monkeypatch.delitem(ATTENTIONS_PER_LAYER, "diffllama")
    with pytest.raises(ModelError, match="attends 4 times in a pass, but its configuration tells of 2 layers"):
        built(tmp_path)


def test_layers_that_attend_with_the_keys_of_others_have_no_cache(tmp_path: Path) -> None:
    saved("gemma3n_text", SERVED["gemma3n_text"], tmp_path)
    facts = read_facts(tmp_path)
    assert [group.layers for group in facts.cache_groups] == [(0,), (1,)]
    ours = built(tmp_path, cache_places={0: (0, 0), 1: (1, 0)})
    assert [(layer.group, layer.index) for layer in ours.attention_layers] == [(0, 0), (1, 0)]
    asked: list[tuple[int, int]] = []

    def attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked.append((layer.group, layer.index))
        return q

    one = torch.zeros(1, dtype=torch.int64)
    ours(ModelInputs(one, one), ForwardContext(attend))
    assert asked == [(0, 0), (1, 0), (1, 0), (0, 0), (0, 0)]


def test_sharing_keys_but_not_the_way_of_attention_is_refused() -> None:
    queries, heads = torch.zeros(1, 4, 1, 4), torch.zeros(1, 2, 1, 4)
    context, trial = ForwardContext(lambda layer, q, k, v: q), TrialPass({0: PoolHeads(2, 4)}, {})
    step = HFForwardPass("Any", context, FoundLayers(), trial)
    attention(torch.nn.Linear(2, 2), queries, heads, heads, None, srv_step=step)
    with pytest.raises(ModelError, match="its layer 1 attends to the keys of layer 0, but not in the same way"):
        attention(torch.nn.Linear(2, 2), queries, heads, heads, None, srv_step=step, sliding_window=3)


def test_layers_that_do_not_attend_are_those_of_the_configuration(tmp_path: Path) -> None:
    fields = {**SIZES, "pad_token_id": 0, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    config = MllamaTextConfig(**fields)
    made = MllamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomized(made).save_pretrained(tmp_path)
    assert [layer.index for layer in built(tmp_path).attention_layers] == [0, 2]
    facts = read_facts(tmp_path)
    (group,) = facts.cache_groups
    whole = replace(facts, cache_groups=(msgspec.structs.replace(group, layers=(0, 1, 2)),))
    with pytest.raises(ModelError, match="layers 0, 2 use attention, but its configuration tells of layers 0, 1, 2"):
        check_without_weights(whole)


def test_sinks_are_told_before_and_after_weights_are_loaded(tmp_path: Path) -> None:
    model = saved("mimo_v2_flash", SERVED["mimo_v2_flash"], tmp_path)
    asked: list[bool] = []
    ours = built(tmp_path, check_layers=lambda layers: asked.extend(layer.sinks for layer in layers))
    assert asked == [False, True] == [layer.sinks for layer in attention_layers(read_facts(tmp_path))]
    scores = model.model.layers[1].self_attn.sinks.tolist()
    assert [layer.sink_scores for layer in ours.attention_layers] == [None, tuple(scores)]


def test_sinks_that_are_no_parameter_are_refused() -> None:
    heads = torch.zeros(1, 2, 1, 4)
    step = HFForwardPass("Any", ForwardContext(DenseCache().attend), FoundLayers(), TrialPass({}, {}))
    with pytest.raises(ModelError, match="takes s_aux, which is not a parameter per head"):
        attention(torch.nn.Linear(2, 2), heads, heads, heads, None, srv_step=step, s_aux=torch.zeros(2))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_native_architectures_may_run_through_transformers_too(kind: str, tmp_path: Path) -> None:
    model = small_model(kind)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path, impl="transformers")
    assert isinstance(ours, HFModel)
    torch.testing.assert_close(our_logits(ours, tokens), our_logits(built(tmp_path), tokens), atol=2e-4, rtol=1e-4)


def test_native_layers_are_refused_for_other_architectures(tmp_path: Path) -> None:
    saved("biogpt", PLAIN, tmp_path)
    with pytest.raises(ModelError, match="BioGptForCausalLM has no native layers") as caught:
        built(tmp_path, impl="srv")
    assert caught.value.code == "unsupported_config"


def test_dummy_weights(tmp_path: Path) -> None:
    model = saved("gpt_neox", PLAIN, tmp_path)
    tokens = tokens_of(model)
    first, again, other = (
        our_logits(built(tmp_path, impl="transformers", load_format="dummy", seed=s), tokens) for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_passes_its_own_check_and_keeps_the_sums_of_logits(tied: bool, tmp_path: Path) -> None:
    saved("olmo2", {"tie_word_embeddings": tied}, tmp_path)
    model = built(tmp_path, impl="transformers", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    float32_op = OpImpl("linear_float32", "torch", lambda args: None, "srv_kernels.reference:linear_float32")
    ops = Ops("small", [*reference_impls(), float32_op])
    with_sums = built(tmp_path, impl="transformers", dtype=torch.bfloat16, ops=ops)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in with_sums.parameters()) == count, "the weight is not copied"
    hidden = torch.randn(3, SIZES["hidden_size"]).bfloat16()
    rounded, sums = model.logits(hidden), with_sums.logits(hidden)
    assert (rounded.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(sums.bfloat16().float(), sums)
    torch.testing.assert_close(sums.bfloat16(), rounded)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 6, "seq_length": 128}, "does not support attention backends"),
        ("gptj", {**GPT2, "rotary_dim": 4}, "does not support attention backends"),
        ("falcon", {}, "does not support attention backends"),
        ("bert", {}, "not causal"),
        (
            "llama4_text",
            {**EXPERTS, "head_dim": 16, "attention_chunk_size": 16, "intermediate_size_mlp": 80},
            "layer 0 attends within chunks of 16 tokens",
        ),
    ],
)
def test_architectures_that_do_not_fit_are_refused(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    saved(kind, fields, tmp_path)
    with pytest.raises(ModelError) as caught:
        built(tmp_path, impl="transformers")
    assert (caught.value.code, reason in caught.value.reason) == ("unsupported_architecture", True), str(caught.value)


def test_unknown_architecture(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["RiddleForCausalLM"], model_type="riddle")
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_architecture"
    assert str(caught.value) == (
        f"model RiddleForCausalLM ({tmp_path}): srv has no such architecture, and transformers"
        f" {transformers.__version__} does not know that type (model_type 'riddle'). Serve a Llama, Mistral or"
        " Qwen model or a causal one that transformers knows, or install a newer release [unsupported_architecture]"
    )


def test_an_encoder_without_native_layers_is_refused_with_those_that_have_them(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["DebertaModel"], model_type="deberta")
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert str(caught.value) == (
        f"model DebertaModel ({tmp_path}): transformers {transformers.__version__} has no causal model of that type"
        " (model_type 'deberta'), and srv has no native layers for it, by which alone encoders are computed."
        f" Serve a causal model, or an encoder of a class that has them ({', '.join(encoder_names())})"
        " [unsupported_architecture]"
    )
    assert {"BertModel", "XLMRobertaModel", "ModernBertModel", "GteModel"} <= {*encoder_names()}


def test_long_messages_of_transformers_are_shortened(tmp_path: Path) -> None:
    saved("biogpt", PLAIN, tmp_path)
    edit_config(tmp_path, hidden_act="soft" * 1000)
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_config"
    assert "transformers cannot build it: hidden_act is 'soft" in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_model_that_ignores_its_positions_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model("llama").save_pretrained(tmp_path)
    forward = LlamaModel.forward

    def blind(self: LlamaModel, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{**kwargs, "position_ids": None})

    monkeypatch.setattr(LlamaModel, "forward", blind)
    with pytest.raises(ModelError, match="logits have a relative error of") as caught:
        built(tmp_path, impl="transformers")
    assert caught.value.code == "unsupported_architecture"


def test_a_model_with_missing_weights(tmp_path: Path) -> None:
    saved("gpt_neox", PLAIN, tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"gpt_neox\.layers\.2") as caught:
        built(tmp_path, impl="transformers")
    assert caught.value.code == "missing_tensors"


def test_facts_that_contradict_the_model(tmp_path: Path) -> None:
    """The KV pool follows the facts, so a layer that differs from them must not run."""
    saved("olmo2", {}, tmp_path)
    edit_config(tmp_path, head_dim=4)
    with pytest.raises(ModelError) as caught:
        built(tmp_path, impl="transformers")
    assert caught.value.code in ("shape_mismatch", "unsupported_config")


def test_progress_ends_complete(tmp_path: Path) -> None:
    saved("gpt_neox", PLAIN, tmp_path)
    calls: list[tuple[int, int, str]] = []
    built(tmp_path, impl="transformers", progress=lambda *call: calls.append(call))
    assert calls[0][1] == 0
    assert calls[-1][0] == calls[-1][1] > 0


def test_the_check_detects_tokens_mixed_outside_attention() -> None:
    """A model whose output depends on other sequences in the batch, and one that does not."""
    table = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    layer = AttentionLayer(0, 2, 2, 4, 0.5)

    def run(tokens: Tensor, cache: DenseCache | None, shift: float) -> Tensor:
        x = table[tokens]
        x = x + shift * torch.cat((torch.zeros(1, 8), x[:-1]))
        heads = x.view(-1, 2, 4)
        if cache is None:
            cache = DenseCache()
            cache.rows = (("whole", 0, len(tokens)),)
        return cache.attend(layer, heads, heads, heads).flatten(1)

    def difference(shift: float) -> float:
        host = torch.device("cpu")
        return largest_difference(50, host, lambda t: run(t, None, shift), lambda t, p, c: run(t, c, shift))

    assert difference(0.0) < 1e-5
    assert difference(1.0) > 0.1


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")
