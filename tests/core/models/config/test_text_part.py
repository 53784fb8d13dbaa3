"""Folders of vision models: their language model is served alone, and computes what the whole model does for text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import engine, messages, saved_small
from every import every
from fp8_weights import FORMS, quantized
from models_small import SIZES, built, edit_config, expected_logits, our_logits, randomized, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3nForCausalLM

from srv.cli.main import main
from srv.errors import ModelError
from srv.models.checkpoints.text_names import text_weight_name
from srv.models.config.text_part import text_config
from srv.models.families.registry import is_native
from srv.models.families.trees import native_tree_or_reason
from srv.models.read import read_facts
from srv.models.transformers.hf_model import HFModel
from srv.planning.resolution import resolve_launch
from srv.testing.engine import user_input

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TILES = {**VISION, "image_size": 16, "patch_size": 8}
QWEN_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "out_hidden_size": 48, "num_heads": 2}
TEXT = {**SIZES, "head_dim": 8, "pad_token_id": 0}
AXES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 500.0}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}
CASES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TILES, "model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TILES, "model_type": "pixtral"},
    },
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": AXES}, "vision_config": QWEN_VISION},
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": AXES},
        "vision_config": {**QWEN_VISION, "intermediate_size": 16},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": {**AXES, "mrope_interleaved": True}},
        "vision_config": {**QWEN_VISION, "hidden_size": 16, "intermediate_size": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "rope_parameters": AXES,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
        "vision_config": {**QWEN_VISION, "hidden_size": 16, "intermediate_size": 16, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "text_config": {**TEXT, **GEMMA},
        "vision_config": {**TILES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
        "vision_config": {**TILES, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
    },
    "idefics3": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": TILES},
    "mllama": {
        "text_config": {**SIZES, "pad_token_id": 0, "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": {**TILES, "attention_heads": 2, "num_global_layers": 1, "intermediate_layers_indices": [0]},
    },
}
LANGUAGE = r"language_model|text_model|lm_head"
SERVED_AS = {
    "llava": ("LlavaForConditionalGeneration", "LlamaForCausalLM"),
    "mistral3": ("Mistral3ForConditionalGeneration", "MistralForCausalLM"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2ForCausalLM"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2ForCausalLM"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3MoeForCausalLM"),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    "llama4": ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    "idefics3": ("Idefics3ForConditionalGeneration", "LlamaForCausalLM"),
    "mllama": ("MllamaForConditionalGeneration", "MllamaForCausalLM"),
}


class VisionModel:
    """A small random vision model in memory, with what the helpers of language models read."""

    def __init__(self, kind: str, **fields: Any) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**CASES[kind], **fields})
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
        self.model, self.config = randomized(model), config.get_text_config()

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


@every("kind", CASES)
def test_logits_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model = VisionModel(kind)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    expected = expected_logits(model, tokens)
    assert expected.std() > 0.5, "the logits are too flat for the comparison to mean anything"
    facts = read_facts(tmp_path)
    assert (facts.text_part_of, facts.architecture) == SERVED_AS[kind]
    text = [tensor for name, tensor in model.model.named_parameters() if re.search(LANGUAGE, name)]
    assert facts.parameters == sum(tensor.numel() for tensor in text)
    ours = built(tmp_path)
    assert isinstance(ours, HFModel) == (not is_native(facts.architecture))
    torch.testing.assert_close(our_logits(ours, tokens), expected, atol=3e-4, rtol=1e-3)
    if kind in ("llava", "qwen3_vl"):  # which name the weights differently
        through = built(tmp_path, impl="transformers")
        assert isinstance(through, HFModel)
        torch.testing.assert_close(our_logits(through, tokens), expected, atol=3e-4, rtol=1e-3)


def test_experts_of_published_checkpoints_have_inputs_as_rows(tmp_path: Path) -> None:
    """As of Qwen3-VL; transformers saves those of a new model with outputs as rows."""
    model = VisionModel("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stored.items() if ".experts." in name}
    assert {tuple(tensor.shape) for tensor in turned.values()} == {(6, 48, 40), (6, 20, 48)}
    save_file({**stored, **turned}, path)
    tokens = tokens_of(model)
    ours = our_logits(built(tmp_path, impl="srv"), tokens)
    torch.testing.assert_close(ours, expected_logits(model, tokens), atol=3e-4, rtol=1e-3)


def test_a_language_model_beside_parts_for_images_and_audio(tmp_path: Path) -> None:
    """Those of Gemma 3n need packages that are not installed. Its checkpoints have keys that its layers do not read."""
    text: dict[str, Any] = {**TEXT, "num_hidden_layers": 4, "layer_types": 2 * ["sliding_attention", "full_attention"]}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "altup_num_inputs": 2}
    whole = AutoConfig.for_model("gemma3n", text_config={**text, "num_kv_shared_layers": 2, "sliding_window": 5})
    whole.architectures = ["Gemma3nForConditionalGeneration"]
    torch.manual_seed(0)
    model = randomized(Gemma3nForCausalLM._from_config(whole.text_config, attn_implementation="eager"))
    whole.save_pretrained(tmp_path)
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in model.named_parameters()}
    for unread in ("language_model.layers.2.self_attn.k_proj", "language_model.layers.3.self_attn.v_proj"):
        tensors[f"model.{unread}.weight"] = torch.zeros(16, 48)
    for part in ("vision_tower.stem", "audio_tower.conformer.0", "embed_vision.embedding", "embed_audio.embedding"):
        tensors[f"model.{part}.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    facts = read_facts(tmp_path)
    assert (facts.text_part_of, facts.architecture) == ("Gemma3nForConditionalGeneration", "Gemma3nForCausalLM")
    assert facts.parameters == sum(each.numel() for each in model.parameters())
    ours, tokens = built(tmp_path), tokens_of(model)
    assert ours.loaded_bytes() == facts.weight_bytes
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-3)


def test_ministral_3_in_fp8_within_mistral_3(tmp_path: Path) -> None:
    """As published: a text configuration that names no class, one scale per matrix, and unread scales of inputs."""
    form = FORMS["fp8, names of transformers"]
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 16.0, "original_max_position_embeddings": 4}
    own = {**TEXT, "model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": 0.4}}
    model = VisionModel("mistral3", text_config=own)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if "language_model" in name and name.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        stored[name], stored[f"{layer}.weight_scale_inv"], same = quantized(stored[name], form)
        stored[f"{layer}.activation_scale"] = torch.tensor(2.0)
        with torch.no_grad():
            model.model.get_parameter(name.replace("language_model.model.", "model.language_model.")).copy_(same)
    save_file(stored, tmp_path / "model.safetensors")
    skipped = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    stated = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
    edit_config(tmp_path, quantization_config={**stated, "modules_to_not_convert": skipped})
    facts, tokens = read_facts(tmp_path), tokens_of(model)
    assert (facts.text_part_of, facts.architecture) == ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM")
    ours = built(tmp_path, impl="srv")
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-3)
    (tmp_path / "model.safetensors").unlink()
    alone = read_facts(tmp_path)
    text = [tensor for name, tensor in model.model.named_parameters() if "language_model" in name or "lm_head" in name]
    assert (alone.parameters, alone.unknown_sizes) == (sum(tensor.numel() for tensor in text), None)


def test_a_language_model_without_native_layers_runs_through_transformers(tmp_path: Path) -> None:
    text = {**TEXT, "model_type": "helium"}
    model = VisionModel("llava", text_config=text)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    ours = built(tmp_path)
    assert isinstance(ours, HFModel)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-3)


def test_greedy_tokens_are_those_of_the_whole_model(tmp_path: Path) -> None:
    small = saved_small(VisionModel("qwen2_5_vl"), tmp_path, lengths=(5, 17))
    with engine(small) as served:
        results = served.generate(messages(small.prompts))
    assert [result.tokens for result in results] == small.tokens


def test_plan_and_launch_say_what_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {**LLAVA_15, "text_config": {**TEXT, "model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(small))
    arguments = ["--device", "cpu", "--model-path", str(tmp_path), "--load-format", "dummy"]
    assert main(["plan", *arguments]) == 0
    said = (
        "only the text part of LlavaForConditionalGeneration is served, as LlamaForCausalLM: its weights for"
        " images and audio are not loaded, and requests with either are refused"
    )
    assert f"note: {said}\n" in capsys.readouterr().err
    assert said in resolve_launch(user_input(arguments)).notes


def test_the_older_layout_of_qwen2_vl(tmp_path: Path) -> None:
    """Its checkpoints on the hub have the text model's fields at the top, and a RoPE type of its own."""
    model = VisionModel("qwen2_vl")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": [1, 1, 2]}
    flat = {**text, **config, "rope_parameters": None, "rope_scaling": scaling, "rope_theta": 500.0}
    flat = {name: value for name, value in flat.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tokens = tokens_of(model)
    torch.testing.assert_close(
        our_logits(built(tmp_path, impl="srv"), tokens), expected_logits(model, tokens), atol=3e-4, rtol=1e-3
    )


@every(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.pos_embed.weight", None),
        ("model.vision_tower.ln_pre.weight", None),
        ("multi_modal_projector.linear_1.bias", None),
        ("model.audio_tower.conformer.0.norm.weight", None),
        ("model.embed_vision.embedding.weight", None),
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.backbone.embeddings.weight", "backbone.embeddings.weight"),
        ("model.connector.modality_projection.proj.weight", None),
        ("language_projection.weight", None),
    ],
)
def test_names_of_weights(stored: str, name: str | None) -> None:
    assert text_weight_name(stored) == name


LLAVA_15 = {
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
    "vision_config": {},
    "torch_dtype": "float16",
}


def test_sizes_that_a_nested_configuration_leaves_out(tmp_path: Path) -> None:
    """LLaVA 1.5 7B states few fields; its language model has 6738939904 parameters with 64 more tokens."""
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_15))
    facts = read_facts(tmp_path)
    assert (facts.layers, facts.hidden_size, facts.kv_heads, facts.dtype) == (32, 4096, 32, "float16")
    assert facts.parameters == 6738415616 + 2 * 64 * 4096


QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 97}


@every(
    ("name", "fields"),
    [
        ("InternVLChatModel", {"llm_config": QWEN}),
        ("Qwen2_5OmniModel", {"thinker_config": {"text_config": {**QWEN, "model_type": "qwen2_5_omni_text"}}}),
        ("Qwen2_5OmniThinkerForConditionalGeneration", {"text_config": {**QWEN, "model_type": "qwen2_5_omni_text"}}),
    ],
)
def test_a_language_model_that_is_nested_under_another_name(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = {"architectures": [name], "torch_dtype": "float16", "auto_map": {"AutoModel": "m.M"}, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_facts(tmp_path)
    served = (facts.text_part_of, facts.architecture, facts.vocab_size, facts.dtype)
    assert served == (name, "Qwen2ForCausalLM", 97, "float16")


def test_hunyuan_ocr_is_refused_for_what_its_language_model_computes(tmp_path: Path) -> None:
    """Published with the fields of the language model at the top, and positions of four axes."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    rope = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}
    config = {"architectures": ["HunYuanVLForConditionalGeneration"], "model_type": "hunyuan_vl", "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes, "num_attention_heads": 4}))
    facts = read_facts(tmp_path)
    assert facts.architecture == "HunYuanDenseV1ForCausalLM"
    assert "RoPE type 'xdrope' is not one of" in str(native_tree_or_reason(facts.architecture, facts.config))


def test_names_of_qwen_omni() -> None:
    own = {"thinker.model.norm.weight": "model.norm.weight", "thinker.lm_head.weight": "lm_head.weight"}
    others = dict.fromkeys(("thinker.visual.norm.weight", "talker.model.norm.weight", "token2wav.proj.weight"))
    assert {name: text_weight_name(name) for name in (*own, *others)} == own | others


@every(("outer", "inner", "tied"), [(True, False, True), (None, True, True), (None, None, None), (False, True, False)])
def test_whether_embeddings_are_tied(outer: bool | None, inner: bool | None, tied: bool | None) -> None:
    """The outer field counts for more than the inner one."""
    text = {"model_type": "llama"} if inner is None else {"model_type": "llama", "tie_word_embeddings": inner}
    config = {"text_config": text} if outer is None else {"text_config": text, "tie_word_embeddings": outer}
    assert text_config(config).get("tie_word_embeddings") == tied


def test_other_weights_are_not_skipped(tmp_path: Path) -> None:
    model = VisionModel("llava")
    model.model.model.language_model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.extra") as caught:
        built(tmp_path)
    assert caught.value.code == "unexpected_tensors"


def test_other_vision_models_are_refused(tmp_path: Path) -> None:
    VisionModel("llava").save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["RiddleForConditionalGeneration"], model_type="riddle")
    with pytest.raises(ModelError) as caught:
        built(tmp_path)
    assert caught.value.code == "unsupported_architecture"
