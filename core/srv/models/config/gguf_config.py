"""From GGUF metadata to the fields of a Hugging Face configuration, and to model facts. Torch-free.

Owns the names of fields that all architectures with native layers share, and refuses metadata that they do not
implement. Must not read weights, except the small tensor of RoPE frequency factors.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from srv.errors import ModelError
from srv.models import derive
from srv.models.checkpoints.gguf_header import ROPE_FREQ_FACTORS, GGUFHeader, read_header
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT
from srv.models.checkpoints.gguf_types import OP_TYPES
from srv.models.config.limits import MAX_SIZE
from srv.models.config.overrides import overridden
from srv.models.families.registry import find_gguf, gguf_names
from srv.models.families.trees import MAX_LAYERS, native_tree
from srv.models.layers.rope_config import usable_context
from srv.models.options import DEFAULT_OPTIONS, ReadOptions
from srv.models.unsupported import UnsupportedConfig
from srv.specs import CacheSpec, FullAttention, ModelFacts

UNQUANTIZED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOKENS = "tokenizer.ggml.tokens"
# Chat models end their turns with one of these tokens, even if the file declares only the end-of-text token.
# llama.cpp finds them by their text as well.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
# Metadata that changes the computation. It is refused unless it is zero or absent, or the architecture reads it.
UNSUPPORTED_KEYS = (
    EXPERT_COUNT,
    "attention.scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.temperature_scale",
)
# If a model is sharded over ranks:
DIVIDED_BY_COLUMNS = (".attn_output.weight", *(f".ffn_down{kind}.weight" for kind in ("", "_exps", "_shexp")))
REMEDY = "Use another GGUF file, or the Hugging Face folder of this model"


def read_gguf(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> ModelFacts:
    """Facts of a GGUF file. Its overrides are of the configuration that its metadata become.

    Raises ModelError as `read_header` does, and unknown_architecture, unknown_override, unsupported_config.
    """
    header = read_header(path, search={TOKENS: TURN_ENDS})
    meta = _Metadata(header)
    try:
        facts = _facts(meta, overridden(str(path), _config(meta), options.overrides))
        return replace(facts, overrides=dict(options.overrides))
    except (TypeError, ValueError, OverflowError) as error:
        raise meta.unsupported(f"its metadata holds an invalid value ({error})") from error


def _facts(meta: _Metadata, config: dict[str, Any]) -> ModelFacts:
    header, path = meta.header, meta.header.path
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    stored_types = _stored_types(header)
    quantization, dtype = _types(header, stored_types)
    context = usable_context(config, config["max_position_embeddings"])
    return ModelFacts(
        name=path.stem,
        path=str(path.absolute()),
        format="gguf",
        architecture=config["architectures"][0],
        config=config,
        dtype=dtype,
        quantization=quantization,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        parameters=sum(stored_types.values()),
        weight_bytes=sum(tensor.size for tensor in header.tensors.values()),
        cache_groups=_cache_groups(config, context, dtype),
        end_tokens=_end_tokens(meta),
        stored_types=stored_types,
        column_block=_column_block(header),
    )


def _cache_groups(config: Mapping[str, Any], context: int, dtype: str) -> tuple[CacheSpec, ...]:
    """Those of native layers; without any, no layer is known to have a window."""
    try:
        return derive.cache_groups(native_tree(config["architectures"][0], config), context, dtype)
    except UnsupportedConfig:
        layers, size = range(int(config["num_hidden_layers"])), config["head_dim"]
        return (FullAttention(tuple(layers), config["num_key_value_heads"], size, size),)


class _Metadata:
    """Reads metadata with checks; keys of the architecture are given without its prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header, self.path = header, str(header.path)
        self.prefix = header.metadata.get("general.architecture")
        architecture = find_gguf(self.prefix, experts=bool(self.get(EXPERT_COUNT)))
        if architecture is None or architecture.gguf is None:
            reason = f"its architecture is {self.prefix!r}; srv serves GGUF files of {', '.join(gguf_names())}"
            raise ModelError("unknown_architecture", self.path, reason, REMEDY)
        self.architecture, self.layout = architecture.name, architecture.gguf

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata or f"{self.prefix}.{key}" in self.header.skipped

    def count(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive integer of the architecture, at most `limit`, which no real model exceeds."""
        self._refuse_array(key)
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or not 0 < value <= limit:
            reason = f"metadata {self.prefix}.{key} is {value!r}, not an integer from 1 to {limit}"
            raise ModelError("damaged", self.path, reason, REMEDY)
        return value

    def number(self, key: str) -> float:
        """A number that the file must have."""
        self._refuse_array(key)
        value = self.get(key)
        if value is None:
            raise ModelError("damaged", self.path, f"it lacks metadata {self.prefix}.{key}", REMEDY)
        return float(value)

    def _refuse_array(self, key: str) -> None:
        if f"{self.prefix}.{key}" in self.header.skipped:
            raise self.unsupported(f"metadata {self.prefix}.{key} differs between layers")

    def token(self, kind: str) -> int | None:
        value = self.header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def unsupported(self, reason: str) -> ModelError:
        return ModelError("unsupported_config", self.path, reason, REMEDY)


def _config(meta: _Metadata) -> dict[str, Any]:
    """The configuration that transformers' class of this architecture would have."""
    _refuse_unsupported(meta)
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    if meta.count("attention.value_length", head_dim) != head_dim:
        raise meta.unsupported("its keys and values have heads of different sizes")
    epsilon = meta.get("attention.layer_norm_rms_epsilon")
    tensors = meta.header.tensors
    embedding = tensors.get("token_embd.weight")
    if epsilon is None or embedding is None or embedding.shape[-1] != hidden:
        reason = f"it lacks the norm's epsilon, or an embedding (token_embd.weight) of width {hidden}"
        raise ModelError("damaged", meta.path, reason, REMEDY)
    config = {
        "architectures": [meta.architecture],
        "model_type": meta.prefix,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.count("block_count", limit=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": float(epsilon),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "use_sliding_window": False,
        "rope_parameters": _rope(meta, head_dim),
        "bos_token_id": meta.token("bos"),
        "eos_token_id": meta.token("eos"),
        "pad_token_id": meta.token("padding"),
        **{field: meta.number(key) for key, field in meta.layout.fields.items()},
        **{field: meta.number(key) for key, field in meta.layout.optional_fields.items() if meta.has(key)},
    }
    return config if meta.layout.complete is None else meta.layout.complete(config)


def _refuse_unsupported(meta: _Metadata) -> None:
    metadata = meta.header.metadata
    if metadata.get("split.count", 1) > 1:
        parts = metadata["split.count"]
        remedy = "Join the parts with llama.cpp's `llama-gguf-split --merge`"
        raise ModelError("unsupported_format", meta.path, f"it is one of {parts} parts", remedy)
    if metadata.get("general.type", "model") != "model":
        raise meta.unsupported(f"it holds a {metadata['general.type']}, not a whole model")
    window, context = meta.get("attention.sliding_window"), meta.get("context_length")
    reads_window = "attention.sliding_window" in meta.layout.fields
    if window and context and window < context and not reads_window:
        raise meta.unsupported(f"metadata {meta.prefix}.attention.sliding_window = {window!r} is not implemented")
    for key in UNSUPPORTED_KEYS:
        if meta.get(key) and key not in meta.layout.fields:
            raise meta.unsupported(f"metadata {meta.prefix}.{key} = {meta.get(key)!r} is not implemented")


def _rope(meta: _Metadata, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` as transformers names them. YaRN's attention factor is computed as in llama.cpp."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(meta.get("rope.freq_base") or 10000.0)}
    dim = meta.count("rope.dimension_count", head_dim)
    if dim != head_dim and meta.layout.permutes:
        # The file's row order pairs dimensions across whole heads, so it does not show which dimensions are rotated.
        raise meta.unsupported(f"only {dim} of {head_dim} dimensions of its heads are rotated")
    if dim != head_dim:
        parameters["partial_rotary_factor"] = dim / head_dim
    kind, factor = meta.get("rope.scaling.type"), meta.get("rope.scaling.factor") or meta.get("rope.scale_linear")
    kind = kind or ("linear" if factor else "none")
    if ROPE_FREQ_FACTORS in meta.header.tensors:
        parameters |= {"rope_type": "freq_factors", "freq_factors": _floats(meta.header, ROPE_FREQ_FACTORS)}
    elif kind in ("linear", "yarn") and factor:
        parameters |= {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = meta.count("rope.scaling.original_context_length")
            scale = float(meta.get("rope.scaling.attn_factor") or 1.0)
            parameters["attention_factor"] = scale * (0.1 * math.log(float(factor)) + 1.0)
    elif kind != "none":
        raise meta.unsupported(f"RoPE scaling {kind!r} with factor {factor!r} is not implemented for GGUF files")
    return parameters


def _floats(header: GGUFHeader, name: str) -> list[float]:
    """A small F32 tensor, read from the file."""
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.size > 65536:
        reason = f"tensor {name} has {tensor.size} bytes of type {tensor.type.name}"
        raise ModelError("unsupported_config", str(header.path), reason, REMEDY)
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size)))


def _stored_types(header: GGUFHeader) -> dict[str, int]:
    """The number of parameters that are stored in each type."""
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if tensor.name != ROPE_FREQ_FACTORS:
            counts[tensor.type.name] += math.prod(tensor.shape)
    return dict(counts)


def _types(header: GGUFHeader, parameters: Mapping[str, int]) -> tuple[str | None, str]:
    """(quantization, dtype): the type in which most of the model's parameters are stored."""
    quantized = {tensor.type.name for tensor in header.tensors.values() if tensor.type.quantized}
    if quantized:
        return f"gguf:{max(quantized, key=lambda name: parameters.get(name, 0))}", "float16"
    dtype = max(parameters, key=lambda name: parameters[name]) if parameters else "F32"
    return None, UNQUANTIZED_DTYPES.get(dtype, "float32")


def _column_block(header: GGUFHeader) -> int:
    """Elements per quantization block of the matrices that are divided by columns; their least common multiple."""
    divided = (tensor.type for tensor in header.tensors.values() if tensor.name.endswith(DIVIDED_BY_COLUMNS))
    return math.lcm(*(kind.elements for kind in divided if kind.name in OP_TYPES))


def _end_tokens(meta: _Metadata) -> tuple[int, ...]:
    """The declared end-of-text, end-of-turn and end-of-message tokens; `TURN_ENDS` if no end of turn is declared."""
    declared = [meta.token("eos"), meta.token("eot"), meta.token("eom")]
    if meta.token("eot") is None:
        declared += sorted(meta.header.found.get(TOKENS, {}).values())
    return tuple(dict.fromkeys(token for token in declared if token is not None))
