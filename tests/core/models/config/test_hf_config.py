"""Facts of Hugging Face folders: from config.json and safetensors headers, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from every import every

from srv.errors import ModelError
from srv.models.read import read_facts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def folder(tmp_path: Path, **fields: Any) -> Path:
    config = {name: value for name, value in {**LLAMA, **fields}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def quantized(method: Any, **fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}}


def in_group(**fields: Any) -> dict[str, Any]:
    return quantized("compressed-tensors", config_groups={"group_0": fields})


def packed_group(**weights: Any) -> dict[str, Any]:
    return in_group(targets=["Linear"], format="pack-quantized", weights=weights)


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]], cut: int = 0) -> None:
    """A file with the header of `tensors` (type, shape, bytes) and zeros as data, `cut` bytes short."""
    at, header = 0, {}
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    whole = struct.pack("<Q", len(raw)) + raw + bytes(at)
    path.write_bytes(whole[: len(whole) - cut])


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_facts(path)
    return caught.value


def test_configuration_without_weights(tmp_path: Path) -> None:
    facts = read_facts(folder(tmp_path))
    assert (facts.format, facts.dtype, facts.weight_bytes) == ("config", "bfloat16", 2 * (facts.parameters or 0))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (2, 4, 2, 8)
    assert (facts.end_tokens, facts.context_length) == ((2,), 128)
    assert facts.parameters == 2 * 100 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert facts.name == tmp_path.name
    tied = read_facts(folder(tmp_path, tie_word_embeddings=True))
    assert facts.parameters - tied.parameters == 100 * 32


def test_dtype_and_size_are_those_of_the_weights(tmp_path: Path) -> None:
    folder(tmp_path, torch_dtype="float32")
    safetensors(tmp_path / "model.safetensors", {"a": ("F16", [4, 8], 64), "b": ("F32", [8], 32)})
    facts = read_facts(tmp_path)
    assert (facts.format, facts.dtype, facts.parameters, facts.weight_bytes) == ("safetensors", "float16", 40, 96)


@every(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float32"}, ("float32", False)),
        ({"torch_dtype": ..., "dtype": "float16"}, ("float16", False)),
        ({"torch_dtype": ...}, ("bfloat16", True)),
        ({"torch_dtype": None, "quantization_config": {"quant_method": "mxfp4"}}, ("bfloat16", False)),
        ({"torch_dtype": ..., "architectures": ["BertModel"], "model_type": "bert"}, ("float32", True)),
    ],
)
def test_dtype_without_weights(fields: dict[str, Any], dtype: tuple[str, bool], tmp_path: Path) -> None:
    """If nothing states it, that of most published checkpoints is assumed: encoders have 32 bits, others 16."""
    facts = read_facts(folder(tmp_path, **fields))
    assert (facts.dtype, facts.assumes_dtype) == dtype


def test_the_copy_of_a_tied_output_layer_does_not_count(tmp_path: Path) -> None:
    stored = {"model.embed_tokens.weight": ("F16", [4, 8], 64), "lm_head.weight": ("F16", [4, 8], 64)}
    safetensors(tmp_path / "model.safetensors", stored)
    counted = [read_facts(folder(tmp_path, tie_word_embeddings=tied)).parameters for tied in (True, False)]
    assert counted == [32, 64]


@every(
    ("stated", "alike"),
    [
        (quantized("AWQ", bits="4", group_size="32", version="GEMM"), quantized("awq", bits=4, group_size=32)),
        (
            packed_group(num_bits="4", type="INT", group_size="16"),
            packed_group(num_bits=4, type="int", group_size=16),
        ),
        (quantized(None, load_in_4bit=True), quantized("bitsandbytes", load_in_4bit=True)),
    ],
)
def test_spellings_that_tools_accept_mean_the_same(
    stated: dict[str, Any], alike: dict[str, Any], tmp_path: Path
) -> None:
    first, second = (read_facts(folder(tmp_path, **each)) for each in (stated, alike))
    assert first.quantization == second.quantization is not None
    assert (first.stored_types, first.unknown_sizes) == (second.stored_types, None)


def test_names_of_a_vision_model_exclude_layers_of_its_language_model(tmp_path: Path) -> None:
    def int8(*skipped: str) -> int:
        stated = {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", *skipped]}
        fields = {**quantized("bitsandbytes", **stated), "model_type": "gemma3", "vision_config": {}}
        nested = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8}
        config = folder(tmp_path, architectures=["Gemma3ForConditionalGeneration"], text_config=nested, **fields)
        return read_facts(config).stored_types["int8"]

    assert int8() - int8("model.language_model.layers.1.mlp") == 3 * 32 * 48
    assert int8() - int8("language_model.model.layers.1.mlp") == 3 * 32 * 48


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    folder(tmp_path)
    for name in ("one", "two", "stray"):
        safetensors(tmp_path / f"{name}.safetensors", {name: ("BF16", [2], 4)})
    index = {"weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_facts(tmp_path).parameters == 4


def test_truncated_weights(tmp_path: Path) -> None:
    folder(tmp_path)
    tensors = {"a": ("F32", [64], 256)}
    safetensors(tmp_path / "model.safetensors", tensors)
    whole = (tmp_path / "model.safetensors").stat().st_size
    for cut in (1, 100, 256, 257, whole - 3, whole):
        safetensors(tmp_path / "model.safetensors", tensors, cut=cut)
        assert refusal(tmp_path).code == "truncated", f"{cut} bytes short"


@every(
    ("raw", "reason"),
    [
        (struct.pack("<Q", 2**40) + bytes(64), "claims"),
        (struct.pack("<Q", 8) + b"not json", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 8) + b'{"a":{}}', "cannot be read"),
    ],
)
def test_damaged_weights(raw: bytes, reason: str, tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(raw)
    error = refusal(tmp_path)
    assert (error.code, reason in error.reason) == ("damaged", True), str(error)


def test_sizes_that_contradict_the_shape(tmp_path: Path) -> None:
    safetensors(folder(tmp_path) / "model.safetensors", {"a": ("F32", [64], 128)})
    assert refusal(tmp_path).code == "damaged"


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 7]}))
    assert read_facts(tmp_path).end_tokens == (7, 2)


@every(
    ("fields", "code", "reason"),
    [
        ({"architectures": ..., "model_type": "riddle"}, "unknown_architecture", "'riddle'"),
        ({"hidden_size": None}, "unsupported_config", "hidden_size"),
        ({"num_hidden_layers": 4_000_000_000}, "unsupported_config", "4000000000"),
        ({"num_hidden_layers": "two"}, "unsupported_config", "'two'"),
        ({"num_attention_heads": 0}, "unsupported_config", "heads"),
        ({"head_dim": "x"}, "unsupported_config", "head_dim is 'x'; it must be an integer up to"),
        ({"kv_lora_rank": 512}, "unsupported_config", "kv_lora_rank"),
        ({"layer_types": ["full_attention", "mamba"]}, "unsupported_config", "mamba"),
        (
            {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "num_attention_heads": ...},
            "unsupported_config",
            "RwkvForCausalLM has no attention: it keeps a recurrent state",
        ),
        (
            {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": {}},
            "unsupported_config",
            "Gemma4AssistantForCausalLM only assists another model",
        ),
        (
            {"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet", "max_position_embeddings": ...},
            "unsupported_config",
            "its class in transformers does not support attention backends",
        ),
        (
            {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "layer_types": ["hybrid", "hybrid"]},
            "unsupported_config",
            "ZayaForCausalLM has recurrent states within its attention: queries and keys pass two convolutions",
        ),
        (
            {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "compress_ratios": [0, 4, 128]},
            "unsupported_config",
            "DeepseekV4ForCausalLM attends, beyond a window, to compressed keys and values",
        ),
    ],
)
def test_configurations_that_cannot_be_served(fields: dict[str, Any], code: str, reason: str, tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, **fields))
    assert (error.code, reason in error.reason) == (code, True), str(error)


LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
MAMBA = {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@every(
    ("fields", "reason"),
    [
        ({"hidden_act": 5}, "hidden_act is 5; it must be a string"),
        ({"mamba_d_state": -7}, "mamba_d_state is -7; it must be an integer from 1 to 268435456"),
        ({"index_topk": 2.5}, "index_topk is 2.5; it must be an integer from 1 to"),
        ({"conv_L_cache": 0}, "conv_L_cache is 0; it must be an integer from 1 to"),
        ({"mamba_expand": "8"}, "mamba_expand is '8'; it must be an integer from 1 to"),
        ({"logits_scaling": 0}, "logits_scaling is 0; it must be a number above 0"),
        ({"rope_theta": -10000.0}, "rope_theta is -10000.0; it must be a number above 0"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'; it must be an object"),
        ({"text_config": {"quantization_config": 4}}, "text_config.quantization_config is 4; it must be an object"),
        (quantized("awq", bits="four"), "quantization_config.bits is 'four'; it must be an integer from 1 to 16"),
        (quantized("gptq", bits=4, group_size=0), "quantization_config.group_size is 0; it must be -1, or an integer"),
        (quantized("GPTQ", bits=4, group_size=-5), "quantization_config.group_size is -5; it must be -1, or an"),
        (quantized("gptq", bits=4, dynamic=["-:.*"]), "quantization_config.dynamic is ['-:.*']; it must be an object"),
        (quantized("fp8", weight_block_size=[10**12, 128]), "weight_block_size is [1000000000000, 128]; it must be a"),
        (quantized("fp8", weight_block_size=128), "quantization_config.weight_block_size is 128; it must be a list of"),
        (quantized("fp8", ignored_layers="lm_head"), "ignored_layers is 'lm_head'; it must be a list of names"),
        (quantized("bitsandbytes", load_in_4bit="yes"), "load_in_4bit is 'yes'; it must be true or false"),
        (quantized(None, load_in_8bit=True, llm_int8_skip_modules="lm_head"), "llm_int8_skip_modules is 'lm_head'"),
        (quantized("modelopt", quantization={"exclude_modules": 1}), "quantization.exclude_modules is 1; it must be"),
        (quantized(8), "quantization_config.quant_method is 8; it must be a string"),
        (in_group(targets="Linear"), "config_groups.group_0.targets is 'Linear'; it must be a list of names"),
        (in_group(weights={"num_bits": "four"}), "config_groups.group_0.weights.num_bits is 'four'; it must be an"),
        (in_group(weights={"group_size": -2}), "config_groups.group_0.weights.group_size is -2; it must be an"),
        (in_group(weights=4), "config_groups.group_0.weights is 4; it must be an object"),
        (in_group(input_activations=[1]), "config_groups.group_0.input_activations is [1]; it must be an object"),
        (quantized("compressed-tensors", config_groups={"a": [1]}), "config_groups.a is [1]; it must be an object"),
        (quantized("compressed-tensors", sparsity_config="x"), "sparsity_config is 'x'; it must be an object"),
        (quantized("torchao", modules_to_not_convert=5), "modules_to_not_convert is 5; it must be a list of names"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it must be a number from 0 to"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.0}},
            "rope_scaling.factor is 0.0; it must be a number above 0",
        ),
        ({"key_multiplier": float("nan")}, "key_multiplier is nan; it must be a number"),
        ({"head_dim": 10**400}, "head_dim is a huge integer; it must be an integer up to 268435456"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is a huge integer; it must be a number from 0 to 1e+12"),
        ({"num_key_value_heads": 10**400}, "num_key_value_heads is a huge integer; it must be an integer"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor is 1e+308; it must be a number up to 1e+12"),
        ({"text_config": 5}, "text_config is 5; it must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        (
            {"rope_scaling": {**YARN, "factor": 1e308}},
            "rope_scaling.factor is 1e+308; it must be a number above 0, up to",
        ),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, "rope_scaling.factor is inf; it must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "rope_scaling.factor is '8'; it must be a number"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": "x"}}, "embeddings is 'x'; it must be a number"),
        ({"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type is 5; it must be a string"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": "a"}}, "short_factor is 'a'; it must be a list"),
        ({"text_config": {"rope_theta": []}}, "text_config.rope_theta is []; it must be a number"),
        ({"head_dim": -1}, "head_dim is -1; it must be an integer from 0 to"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list of strings"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "rope_scaling.beta_fast is -1; it must be a number from 0"),
        ({"rope_scaling": {**YARN, "mscale": {}}}, "rope_scaling.mscale is {}; it must be a number"),
        ({"num_attention_heads": 2.0}, "num_attention_heads is 2.0; it must be an integer from 1 to"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be an integer from 1 to"),
        ({"intermediate_size": "160"}, "intermediate_size is '160'; it must be an integer"),
        ({"attention_bias": "false"}, "attention_bias is 'false'; it must be true or false"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers is a huge integer; it must be an integer from 1 to 10000"),
        (LATENT | {"kv_lora_rank": 64.0}, "kv_lora_rank is 64.0; it must be an integer from 1 to"),
        (LATENT | {"qk_rope_head_dim": 10**12}, "qk_rope_head_dim is 1000000000000; it must be an integer"),
        (LATENT | {"n_routed_experts": 10**8}, "n_routed_experts is 100000000; it must be an integer from 0 to 16384"),
        (MAMBA | {"mamba_dt_rank": "8"}, "mamba_dt_rank is '8'; it must be auto or an integer from 1 to"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, **fields))
    assert error.what == str(tmp_path / "config.json")
    assert reason in error.reason, str(error)


@every(
    ("fields", "reason"),
    [
        ({"intermediate_size": None}, "intermediate_size is None, with which no model can be made"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": None},
            "num_experts_per_tok is null, with which no model can be made",
        ),
        (
            {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "attn_config": {"kv_n_heads": []}},
            "attn_config.kv_n_heads is [], with which no model can be made",
        ),
        ({"max_position_embeddings": 1}, "its context of 1 tokens has no room for a request, which takes 2 at least"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; it must be one of float64, float32"),
    ],
)
def test_a_value_that_fits_no_model_is_refused_by_key(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    error = refusal(folder(tmp_path, **fields))
    assert (error.code, reason in error.reason) == ("unsupported_config", True), str(error)
    assert error.remedy.startswith("Correct the value")


def test_a_field_that_the_model_does_not_read_may_hold_anything(tmp_path: Path) -> None:
    assert read_facts(folder(tmp_path, kv_lora=None, n_group="x", chunk_size=[], expert_layer_period=-1)).layers == 2


DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"


@every(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "quant_model_description.json"]
)
def test_json_that_is_nested_too_deeply_is_refused_by_file(name: str, tmp_path: Path) -> None:
    (folder(tmp_path) / name).write_text(DEEP)
    error = refusal(tmp_path)
    (tmp_path / name).unlink()
    assert (error.code, error.what) == ("damaged", str(tmp_path / name))


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
    assert "not valid JSON" in refusal(tmp_path).reason


@every("value", [5, None, ["x"], {"b": 1}, "a\0b"])
def test_a_weight_map_names_files(value: object, tmp_path: Path) -> None:
    index = folder(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"tensor": value}}))
    error = refusal(tmp_path)
    assert (error.code, error.what) == ("damaged", str(index))
    assert f"weight_map names {value!r} as a file" in error.reason


@every("text", ["", "[1]", "{", "\x00"])
def test_config_that_is_not_a_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert refusal(tmp_path).code == "damaged"


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(b"x")
    error = refusal(tmp_path)
    assert error.code == "unsupported_format"
    assert "safetensors" in error.remedy


@every(
    ("fields", "context"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 128),
    ],
)
def test_context_length_with_a_single_rope_scaling(fields: dict[str, Any], context: int, tmp_path: Path) -> None:
    assert read_facts(folder(tmp_path, **fields)).context_length == context


def test_alternative_names_of_fields(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 77}
    gone = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        ...,
    )
    facts = read_facts(folder(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2", **gone, **gpt2))
    assert (facts.hidden_size, facts.layers, facts.heads, facts.kv_heads) == (32, 3, 4, 4)
    assert facts.context_length == 77
    xglm = {"d_model": 24, "num_layers": 2, "attention_heads": 6, "ffn_dim": 40, "max_position_embeddings": 99}
    facts = read_facts(folder(tmp_path, architectures=["XGLMForCausalLM"], model_type="xglm", **gone | xglm))
    assert (facts.hidden_size, facts.layers, facts.heads, facts.kv_heads) == (24, 2, 6, 6)


def test_hub_cache_folder_is_named_after_its_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert read_facts(folder(snapshot)).name == "org/some-model"
