"""Small random models of transformers for tests, and the same weights as folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models_reference_ops import reference_ops
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BambaConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    SmolLM3Config,
)

from srv.dist.agreement import StepShape
from srv.errors import ModelError
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.build import build
from srv.models.checkpoints.gguf_types import CODEBOOK_TYPES
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.models.transformers.hf_check import DenseCache

HOST = torch.device("cpu")
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "granite": GraniteConfig,
    "smollm3": SmolLM3Config,
    "gemma3": Gemma3TextConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "bamba": BambaConfig,
    "jamba": JambaConfig,
    "falcon_h1": FalconH1Config,
    "nemotron_h": NemotronHConfig,
    "minimax": MiniMaxConfig,
    "lfm3": Lfm3Config,
    "recurrent_gemma": RecurrentGemmaConfig,
    "olmo_hybrid": OlmoHybridConfig,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
# Weights are large enough that attention, RoPE and every bias change the logits visibly.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


DELTA_RULE = {
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "full_attention_interval": 3,
}
SHARED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
# Fields whose defaults in transformers do not fit these sizes.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "smollm3": {"pad_token_id": 0},
    "qwen3_next": {**DELTA_RULE, "num_experts": 0, "num_experts_per_tok": 1},
    "qwen3_5": DELTA_RULE,
    "qwen3_5_moe": {**DELTA_RULE, **SHARED_EXPERTS},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "pad_token_id": 0,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 96},
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M-",
        "head_dim": 8,
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "time_step_min": 1e-30,  # to which transformers raises steps, those of prompts alone
    },
    "minimax": {"num_local_experts": 5, "block_size": 16},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "pad_token_id": 0,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "pad_token_id": 0, "attention_window_size": 6},
    "olmo_hybrid": {
        "pad_token_id": 0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,  # transformers saves the convolution in three parts of equal size
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"head_dim": 8, "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "pad_token_id": 0},
}
GRANITE = {"embedding_multiplier": 2.5, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5}


def small_model(kind: str, **fields: Any) -> Any:
    """A random model in float32 with eager attention; biases and norms are random too."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS[kind](**{**SIZES, **OWN_SIZES.get(kind, {}), **fields})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


# By the ends of parameters' names; 1 for others. With these decays, recurrent states last for several tokens.
MEANS = {"bias": 0.0, "A_log": -2.0, "recurrent_param": -4.0}


def randomized(model: Any) -> Any:
    """Give values to the parameters that transformers initialises to zero or one, and to biases of experts."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("proj_bias"):  # the latter are of experts
                mean = next((mean for end, mean in MEANS.items() if name.endswith(end)), 1.0)
                parameter.normal_(mean, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.normal_(0.0, 0.3)
    return model.eval()


def tokens_of(model: Any, count: int = 24) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def expected_logits(model: Any, tokens: Tensor) -> Tensor:
    """The logits of transformers: one sequence in one pass."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
    return logits


def our_logits(model: CausalLM, tokens: Tensor, first: int = 7, shape: StepShape | None = None) -> Tensor:
    """Our logits of the sequence in two chunks, the second batched with a copy of the sequence; both must agree.

    `shape`: of both steps.
    """
    cache, count = DenseCache(), len(tokens)
    positions = torch.arange(count)
    with torch.inference_mode():
        cache.rows = (("a", 0, first),)
        context = ForwardContext(cache.attend, shape=shape)
        head = model.logits(model(ModelInputs(tokens[:first], positions[:first]), context), shape)
        cache.rows = (("b", 0, count), ("a", first, count - first))
        inputs = ModelInputs(torch.cat((tokens, tokens[first:])), torch.cat((positions, positions[first:])))
        both = model(inputs, context)
        rest = model.logits(both, shape)
    torch.testing.assert_close(torch.cat((head, rest[count:])), rest[:count], atol=2e-4, rtol=1e-4)
    return rest[:count]


def agree(ours: CausalLM, model: Any) -> bool:
    """Whether our logits equal those of transformers for twelve tokens; NaN equals nothing."""
    tokens = tokens_of(model, 12)
    return torch.allclose(our_logits(ours, tokens), expected_logits(model, tokens), atol=5e-4, rtol=1e-3)


def built(path: Path, impl: str = "auto", load_format: str = "auto", **more: Any) -> CausalLM:
    """The model at `path` on the CPU in float32 with the reference ops; the weights of a GGUF file are dequantized."""
    facts = read_facts(path)
    values: dict[str, Any] = {"device": HOST, "dtype": torch.float32, "ops": reference_ops()}
    values |= {"dequantize": facts.format == "gguf", "model_impl": impl, "load_format": load_format, **more}
    options = {name: values.pop(name) for name in LayerOptions._fields if name in values}
    context = {field.name: values.pop(field.name) for field in fields(BuildContext) if field.name in values}
    return build(facts, LayerOptions(**options), BuildContext(**context), **values)


def refused(folder: Path, **options: Any) -> ModelError:
    """Why it is not built."""
    with pytest.raises(ModelError) as caught:
        built(folder, **options)
    return caught.value


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    """Overwrite tensors of model.safetensors, in whose names __ is a dot; None removes one."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in weights.items() if value is not None}, path)


def edit_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of config.json; None removes one."""
    path = folder / "config.json"
    removed = {name for name, value in fields.items() if value is None}
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in removed}))


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


GEMMA3_NAMES = {
    **GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


GEMMAS = ("gemma2", "gemma3")  # which store the weights of norms with 1 added


def gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    names = GEMMA3_NAMES if arch in (*GEMMAS, "olmo2") else GGUF_NAMES
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{names[inner]}.{kind}"
    return f"{names[stem]}.{kind}"


# The GGUF files of these architectures have the rows of queries and keys in another order.
PERMUTED = ("llama", "granite", "smollm3")
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter, where RoPE pairs are adjacent."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def deinterleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


# Byte offsets of the half-precision scales in a block, for types that the gguf library can decode but not encode.
SCALES = {
    **{Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)},
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS), (0,)),
    **dict.fromkeys((Kind.IQ3_S, Kind.IQ1_S), (0,)),
    Kind.IQ1_M: (),
}
# The values of these are large multiples of a block's scale. Weights of a standard deviation of about 0.1, as those of
# the other types have, keep logits small: with larger ones, float32 itself is as far from the exact result as the
# tolerances of tests, and which of them fail depends on the processor.
LARGE = {Kind.Q4_K: 4e-4, Kind.Q5_K: 2e-4, Kind.Q6_K: 7e-5, Kind.IQ4_XS: 8e-5}


def codebook_kinds() -> Callable[[str], Kind]:
    """A type of 1 to 3 bits for each matrix; every type comes up among nine of them."""
    names: dict[str, int] = {}

    def kind_of(name: str) -> Kind:
        if "norm" in name:
            return Kind.F32
        return Kind[CODEBOOK_TYPES[names.setdefault(name, len(names)) % len(CODEBOOK_TYPES)]]

    return kind_of


def blocks(weight: np.ndarray, kind: Kind, random: np.random.Generator) -> np.ndarray:
    """The bytes of a matrix in a quantized type; random blocks with moderate scales if the library has no encoder."""
    if kind not in SCALES:
        return gguf.quants.quantize(weight, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = weight.shape[:-1], weight.shape[-1]
    data = random.integers(0, 256, (*rows, columns // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        data[..., at : at + 2] = np.frombuffer(np.float16(LARGE.get(kind, 0.002)).tobytes(), dtype=np.uint8)
    if kind == Kind.IQ1_M:  # the highest four bits of four words are a scale, the lowest of them first
        nibbles = int(np.float16(0.02).view(np.uint16)) >> np.arange(0, 16, 4) & 15
        data[..., 49::2] = data[..., 49::2] & 15 | (nibbles << 4).astype(np.uint8)
    return data.reshape(*rows, -1)


def _stored_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Those of a model, with the projections of experts divided; views, which can be given other values."""
    for name, parameter in model.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = parameter.detach().chunk(2, 1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("shared_expert_gate.weight"):
            yield name, parameter.detach()[0]  # as llama.cpp stores it
        else:
            yield (f"{name}.weight" if name.endswith(".experts.down_proj") else name), parameter.detach()


def write_gguf(
    path: Path,
    model: Any,
    arch: str,
    kind: Kind = Kind.F32,
    original_context: int | None = None,
    kinds: Callable[[str], Kind] | None = None,
    **metadata: Any,
) -> None:
    """Write `model` as a GGUF file, and set the parameters of `model` to the dequantized values.

    Matrices are stored in type `kind`, or in the type that `kinds` returns for their name.
    """
    config, random = model.config, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    if original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(original_context)
    for key, field in MULTIPLIERS.items():
        if hasattr(config, field):
            writer.add_float32(f"{arch}.{key}", getattr(config, field))
    if arch in GEMMAS:
        writer.add_sliding_window(config.sliding_window)
    for key, value in metadata.items():
        name = key.replace("__", ".").replace("ARCH", arch)
        if isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    for name, parameter in _stored_parameters(model):
        weight = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        permuted = arch in PERMUTED and heads is not None
        stored = interleaved(weight, heads) if permuted else weight
        if arch in GEMMAS and name.endswith("norm.weight"):
            stored = stored + 1
        block_type = kind if kinds is None else kinds(name)
        if weight.ndim == 1 or block_type == Kind.F32:
            writer.add_tensor(gguf_name(name, arch), np.ascontiguousarray(stored))
            continue
        data = blocks(np.ascontiguousarray(stored), block_type, random)
        writer.add_tensor(gguf_name(name, arch), data, raw_dtype=block_type)
        decoded = gguf.quants.dequantize(data, block_type).reshape(weight.shape)
        parameter.copy_(torch.from_numpy((deinterleaved(decoded, heads) if permuted else decoded).copy()))
    factors = model.config.__dict__.get("test_freq_factors")
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
