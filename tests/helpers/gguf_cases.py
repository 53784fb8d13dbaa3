"""Small random models whose GGUF files are those of llama.cpp's converter, by what was recorded of it.

`gguf_recorded.json` has, of each model, the converter's metadata, and for each stored tensor the elements of the
Hugging Face checkpoint that it consists of. It is written by `tests/helpers/record_gguf.py`, which needs llama.cpp.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from latent_steps import Steps
from models_small import expected_logits, our_logits, randomized
from numpy.typing import NDArray
from recurrent_small import recurrent_logits
from safetensors.numpy import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.transformers.hf_check import DenseCache
from srv.specs import Latent, ModelFacts, Recurrent

Values = NDArray[np.float32]
RECORDED = Path(__file__).with_name("gguf_recorded.json")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A model type of transformers, and fields of its configuration.

    `published`: fields of config.json as files of the hub have them, which the converter reads and transformers does
    not write; None removes one, and NULL is null. `neutral`: constants that the converter multiplies into weights,
    with values that change none.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    neutral: dict[str, Any] = field(default_factory=dict)
    auto: Any = AutoModelForCausalLM

    def made(self) -> Any:
        torch.manual_seed(0)
        fields = {**SIZES, **self.fields}
        if isinstance(getattr(CONFIG_MAPPING[self.kind], "head_dim", None), property):
            del fields["head_dim"]
        config = AutoConfig.for_model(self.kind, **{name: value for name, value in fields.items() if value != "absent"})
        model = randomized(self.auto.from_config(config, attn_implementation="eager", dtype=torch.float32))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
        return model


NULL = "null"
NO_HEAD_DIM = {"head_dim": "absent"}
NO_KV = {**NO_HEAD_DIM, "num_key_value_heads": "absent"}
NOMIC = {
    "n_positions": 8192,
    "activation_function": "swiglu",
    "causal": False,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "rotary_emb_interleaved"), False),
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": NULL,
    "max_position_embeddings": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 64}
DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
DELTA = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
GRANITE = {"embedding_multiplier": 2.5, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5}
FALCON_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": Case("qwen2", NO_HEAD_DIM),
    "qwen3": Case("qwen3"),
    "granite": Case("granite", {**GRANITE, **NO_HEAD_DIM}),
    "smollm3": Case("smollm3", {**NO_HEAD_DIM, "num_hidden_layers": 4}),
    "gemma2": Case("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma3": Case("gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": 5, "num_hidden_layers": 6}),
    "olmo2": Case("olmo2", NO_HEAD_DIM),
    "ernie4_5": Case("ernie4_5"),
    "qwen2moe": Case("qwen2_moe", {**SHARED, **NO_HEAD_DIM}),
    "qwen3moe": Case("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "bert": Case("bert", NO_KV, auto=AutoModel),
    "xlm-roberta": Case(
        "xlm-roberta", {**NO_KV, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 66}, auto=AutoModel
    ),
    "modern-bert": Case("modernbert", {**NO_KV, "local_attention": 8, "num_hidden_layers": 4}, auto=AutoModel),
    "nomic-bert": Case("nomic_bert", NO_KV, NOMIC, auto=AutoModel),
    "jina-bert-v3": Case(
        "jina_embeddings_v3",
        {**NO_KV, "type_vocab_size": 1, "pad_token_id": 1},
        {"architectures": ["XLMRobertaModel"], "lora_adaptations": ["task"]},
        auto=AutoModel,
    ),
    "mpt": Case(
        "mpt", {"n_layers": 2, "n_heads": 4, "d_model": 64, **NO_HEAD_DIM}, {"architectures": ["MPTForCausalLM"]}
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "intermediate_size": 64},
    ),
    "deepseek2": Case("deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek2-lite": Case(
        "deepseek_v2",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek3": Case("deepseek_v3", {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek32": Case(
        "deepseek_v32",
        {**DEEPSEEK, "index_n_heads": 24, "index_head_dim": 32, "index_topk": 8, "pad_token_id": None},
    ),
    "glm4": Case("glm4", {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "chatglm": Case("glm", {"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}),
    "glm4moe": Case(
        "glm4_moe",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 2,
            "n_shared_experts": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3": Case("phi3", {"sliding_window": 9}),
    "phi3-long": Case(
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "phi2": Case(
        "phi", {"num_key_value_heads": 4, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5, **NO_HEAD_DIM}
    ),
    "command-r": Case("cohere", {"logit_scale": 0.3, **NO_HEAD_DIM}),
    "cohere2": Case("cohere2", {"logit_scale": 0.3, "sliding_window": 5, "num_hidden_layers": 4}, {"rotary_pct": 1.0}),
    "starcoder2": Case("starcoder2", {**NO_HEAD_DIM, "sliding_window": None}),
    "lfm2": Case("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], **NO_HEAD_DIM}),
    "lfm2moe": Case(
        "lfm2_moe",
        {
            **EXPERTS,
            **NO_HEAD_DIM,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
        },
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            **NO_HEAD_DIM,
        },
        {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granitehybrid-dense": Case(
        "granitemoehybrid",
        {
            **MAMBA,
            **GRANITE,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            **NO_HEAD_DIM,
        },
        {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "bamba": Case("bamba", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], **NO_HEAD_DIM}),
    "falcon-h1": Case(
        "falcon_h1",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "mlp_multipliers": [0.9, 0.6],
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
        },
        neutral={
            **dict.fromkeys(FALCON_FACTORS, 1.0),
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
        },
    ),
    "nemotron_h": Case(
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "time_step_min": 1e-30,
        },
        {
            "hybrid_override_pattern": "M*-M",
            "num_hidden_layers": 4,
            **dict.fromkeys(("layers_block_type", "layer_types", "n_routed_experts", "num_experts_per_tok")),
            **dict.fromkeys(("n_group", "topk_group")),
        },
    ),
    "olmoe": Case("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, **NO_HEAD_DIM}),
    "minimax-m2": Case("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "qwen3next": Case("qwen3_next", {**DELTA, **SHARED}),
    "qwen35": Case("qwen3_5_text", DELTA),
    "qwen35moe": Case("qwen3_5_moe_text", {**DELTA, **SHARED}),
    "llama4": Case(
        "llama4_text",
        {
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
        },
    ),
    "falcon": Case(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "hidden_size": 64, "bias": False, **NO_HEAD_DIM}
    ),
    "falcon-7b": Case(
        "falcon", {"multi_query": True, "parallel_attn": True, "bias": False, **NO_HEAD_DIM}, {"num_kv_heads": None}
    ),
    "bloom": Case("bloom", {"n_layer": 2, "n_head": 4, **NO_HEAD_DIM}),
    "gpt2": Case("gpt2", NO_HEAD_DIM, {"n_ctx": 256}),
    "gptneox": Case("gpt_neox", {"hidden_act": "gelu", "rotary_pct": 0.25, **NO_HEAD_DIM}, {"rotary_pct": 0.25}),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, **NO_HEAD_DIM}),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, **NO_HEAD_DIM}),
}


def served_logits(model: CausalLM, facts: ModelFacts, tokens: Tensor) -> Tensor:
    """Our logits, whatever the layers of a model keep; of an encoder, its hidden states."""
    if not facts.generates:
        cache = DenseCache()
        cache.rows = (("a", 0, len(tokens)),)
        with torch.inference_mode():
            return model(ModelInputs(tokens, torch.arange(len(tokens))), ForwardContext(cache.attend))
    if isinstance(group := facts.cache_groups[0], Latent):
        return Steps(model, group).run([([9, 2, 7, 1, 8, 3], tokens, 0)])
    if any(isinstance(group, Recurrent) for group in facts.cache_groups):
        return recurrent_logits(model, facts, tokens)
    return our_logits(model, tokens)


def expected(model: Any, tokens: Tensor) -> Tensor:
    """The same from transformers."""
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        return expected_logits(model, tokens)
    with torch.no_grad():
        states: Tensor = model(input_ids=tokens.unsqueeze(0)).last_hidden_state[0]
    return states


def write_gguf(
    name: str,
    folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    experts: Kind | None = None,
    tensors: int = 0,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint in `folder`, of the model of a case, as a GGUF file.

    Matrices are stored as `kind`, those of experts as `experts` if it is given, and the checkpoint gets their
    dequantized values. Routers, convolutions and vectors stay in float32. `tensors`: how many a file has at most, if
    there are to be several. `record`: in place of that of the case.
    """
    record = record or recorded()[name]
    sources = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, record["metadata"]["general.architecture"], split_max_tensors=tensors)
    for key, value in record["metadata"].items():
        if key != "general.architecture":
            _add(writer, key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(SIZES["vocab_size"])])
    writer.add_eos_token_id(2)
    for tensor, tensor_record in _each_tensor(record["tensors"]):
        values = stored(tensor_record, sources)
        if kind == Kind.F32 or not _is_quantized(tensor, values):
            writer.add_tensor(tensor, values)
            continue
        block_type = experts if experts is not None and "_exps" in tensor else kind
        data = gguf.quants.quantize(values, block_type)
        writer.add_tensor(tensor, data, raw_dtype=block_type)
        store(tensor_record, gguf.quants.dequantize(data, block_type).reshape(values.shape), sources)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(sources, folder / "model.safetensors", metadata={"format": "pt"})


@functools.cache
def recorded() -> Mapping[str, Any]:
    record: dict[str, Any] = json.loads(RECORDED.read_text())
    return record


def _each_tensor(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tensors of all layers; those that layers have alike are recorded once."""
    for name, tensor_record in tensors.items():
        if "layers" not in tensor_record:
            yield name, tensor_record
        for layer in tensor_record.get("layers", ()):
            yield name.format(layer), {**tensor_record, "source": tensor_record["source"].format(layer)}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _is_quantized(tensor: str, values: Values) -> bool:
    plain = ("norm", "ssm_conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_a", "ssm_d", "position", "token_types")
    return tensor.endswith(".weight") and values.ndim > 1 and not any(pattern in tensor for pattern in plain)


def stored(tensor_record: Mapping[str, Any], sources: Mapping[str, Values]) -> Values:
    """The values of a stored tensor from those of the checkpoint."""
    if "values" in tensor_record:
        return np.array(tensor_record["values"], dtype=np.float32)
    values = np.stack([sources[name].ravel()[_places(tensor_record)] for name in _sources(tensor_record)]).reshape(
        tensor_record["shape"]
    )
    change = tensor_record.get("value")
    if change == "-exp":
        values = -np.exp(values)
    return np.ascontiguousarray(values + 1 if change == "+1" else values * _factors(tensor_record)).astype(np.float32)


def store(tensor_record: Mapping[str, Any], values: Values, sources: Mapping[str, Values]) -> None:
    """Put the values of a stored matrix back into the checkpoint."""
    names = _sources(tensor_record)
    for name, row in zip(names, (values / _factors(tensor_record)).reshape(len(names), -1), strict=True):
        sources[name].reshape(-1)[_places(tensor_record)] = row


def _sources(tensor_record: Mapping[str, Any]) -> list[str]:
    name = tensor_record["source"]
    return [name.replace("*", str(number)) for number in range(tensor_record["shape"][0])] if "*" in name else [name]


def _places(tensor_record: Mapping[str, Any]) -> NDArray[np.int64]:
    """Where the elements of a stored tensor are in that of the checkpoint."""
    if "rows" in tensor_record:
        width = int(np.prod(tensor_record["shape"][1:]))
        return (np.array(tensor_record["rows"])[:, None] * width + np.arange(width)).ravel()
    places = np.array([tensor_record["begin"]])
    for size, stride in tensor_record["axes"]:
        places = (places[:, None] + stride * np.arange(size)).ravel()
    return places


def _factors(tensor_record: Mapping[str, Any]) -> Values:
    """By which rows are multiplied."""
    runs = tensor_record.get("factors", [[1, 1.0]])
    factors = np.concatenate([np.full(count, factor, dtype=np.float32) for count, factor in runs])
    return factors.reshape(-1, *(1,) * (len(tensor_record["shape"]) - 1))
