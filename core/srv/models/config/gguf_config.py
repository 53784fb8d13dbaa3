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
from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_header import LONG_ROPE_FACTORS, ROPE_FREQ_FACTORS, GGUFHeader, read_header
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, needed_tensors
from srv.models.checkpoints.gguf_types import OP_TYPES
from srv.models.config.limits import MAX_SIZE
from srv.models.config.overrides import overridden
from srv.models.families.registry import find_gguf, gguf_names
from srv.models.families.trees import MAX_LAYERS, native_tree, pooled_of
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
# Likewise, with the values of most architectures, unless the layout of one implies others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),  # a softmax
    "attention.causal": (True,),
}
# Values of `pooling_type`; the others are none, and the score of a pair of texts.
POOLING_TYPES = {1: "mean", 2: "cls", 3: "last"}
# These may be arrays, with an entry for each layer.
PER_LAYER = (
    *("attention.head_count_kv", "feed_forward_length"),
    *("attention.sliding_window_pattern", "attention.recurrent_layers"),
)
# If a model is sharded over ranks:
DIVIDED_BY_COLUMNS = (".attn_output.weight", *(f".ffn_down{kind}.weight" for kind in ("", "_exps", "_shexp")))
REMEDY = "Use another GGUF file, or the Hugging Face folder of this model"


def read_gguf(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> ModelFacts:
    """Facts of a GGUF file. Its overrides are of the configuration that its metadata become.

    Raises ModelError as `read_header` does, and unknown_architecture, unknown_override, unsupported_config.
    """
    header = read_header(path, PER_LAYER, search={TOKENS: TURN_ENDS})
    meta = _Metadata(header)
    try:
        facts = _facts(meta, overridden(str(path), _config(meta), options.overrides))
        return replace(facts, overrides=dict(options.overrides))
    except (TypeError, ValueError, OverflowError) as error:
        raise meta.unsupported(f"its metadata holds an invalid value ({error})") from error


def _facts(meta: _Metadata, config: dict[str, Any]) -> ModelFacts:
    header, path = meta.header, meta.header.path
    stored_types = _stored_types(header)
    quantization, dtype = _types(header, stored_types)
    context, tree = usable_context(config, config["max_position_embeddings"]), _tree(config)
    sizes = _head_sizes(config, tree)
    pooled = None if tree is None else pooled_of(config["architectures"][0], config)
    if pooled is not None:
        context = pooled.positions or context
    return ModelFacts(
        name=path.stem.removesuffix(f"-00001-of-{len(header.paths):05}"),
        path=str(path.absolute()),
        format="gguf",
        architecture=config["architectures"][0],
        config=config,
        dtype=dtype,
        quantization=quantization,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        context_length=context,
        parameters=sum(stored_types.values()),
        weight_bytes=sum(tensor.size for tensor in needed_tensors(header).values()),
        cache_groups=_cache_groups(config, tree, context, dtype),
        end_tokens=_end_tokens(meta),
        stored_types=stored_types,
        column_block=_column_block(header),
        pooling=POOLING_TYPES.get(meta.get("pooling_type")) or (None if pooled is None else pooled.pooled_by),
        generates=pooled is None,
    )


def _tree(config: Mapping[str, Any]) -> Part | None:
    """That of native layers; None if they do not support the configuration."""
    try:
        return native_tree(config["architectures"][0], config)
    except UnsupportedConfig:
        return None


def _head_sizes(config: Mapping[str, Any], tree: Part | None) -> dict[str, int]:
    """Those of native layers; without any, what the metadata says."""
    heads = config["num_attention_heads"]
    stated = {"heads": heads, "kv_heads": config["num_key_value_heads"] or heads, "head_dim": config["head_dim"]}
    return stated if tree is None else stated | derive.head_sizes(tree)


def _cache_groups(config: Mapping[str, Any], tree: Part | None, context: int, dtype: str) -> tuple[CacheSpec, ...]:
    """Those of native layers; without any, no layer is known to have a window."""
    if tree is not None:
        return derive.cache_groups(tree, context, dtype)
    layers, sizes = range(int(config["num_hidden_layers"])), _head_sizes(config, None)
    return (FullAttention(tuple(layers), sizes["kv_heads"], sizes["head_dim"], sizes["head_dim"]),)


class _Metadata:
    """Reads metadata with checks; keys of the architecture are given without its prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header, self.path = header, str(header.path)
        self.prefix = header.metadata.get("general.architecture")
        architecture = find_gguf(self.prefix, experts=bool(self.get(EXPERT_COUNT)), marks=_marks(header))
        if architecture is None or architecture.gguf is None:
            reason = f"its architecture is {self.prefix!r}; srv serves GGUF files of {', '.join(gguf_names())}"
            raise ModelError("unknown_architecture", self.path, reason, REMEDY)
        self.architecture, self.layout = architecture.name, architecture.gguf
        self.model_type = architecture.model_type or self.prefix

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata or f"{self.prefix}.{key}" in self.header.skipped

    def count(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """A positive integer of the architecture, at most `limit`, which no real model exceeds."""
        self._refuse_array(key)
        value = self.get(key)
        value = default if value is None else value
        smallest = 1
        if isinstance(value, tuple):
            value, smallest = max(value, default=0), 0  # some layers have none
        if not isinstance(value, int) or not smallest <= value <= limit:
            reason = f"metadata {self.prefix}.{key} is {value!r}, not an integer from 1 to {limit}"
            raise ModelError("damaged", self.path, reason, REMEDY)
        return value

    def field(self, key: str) -> float | str | list[int]:
        """A number or name that the file must have, or a number for each layer."""
        self._refuse_array(key)
        value = self.get(key)
        if value is None:
            raise ModelError("damaged", self.path, f"it lacks metadata {self.prefix}.{key}", REMEDY)
        if isinstance(value, tuple):
            return list(map(int, value))
        return value if isinstance(value, int | str) else float(value)

    def size(self, tensor: str, axis: int) -> int:
        """The size of a tensor that the file must have."""
        found = self.header.tensors.get(tensor)
        if found is None or len(found.shape) <= axis:
            raise ModelError("damaged", self.path, f"it lacks {tensor}", REMEDY)
        return found.shape[axis]

    def _refuse_array(self, key: str) -> None:
        is_array = f"{self.prefix}.{key}" in self.header.skipped or isinstance(self.get(key), tuple)
        if is_array and not self.layout.reads(key):
            raise self.unsupported(f"metadata {self.prefix}.{key} differs between layers")

    def token(self, kind: str) -> int | None:
        value = self.header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def unsupported(self, reason: str) -> ModelError:
        return ModelError("unsupported_config", self.path, reason, REMEDY)


def _marks(header: GGUFHeader) -> set[str]:
    """The names of tensors within layers, and the keys of the metadata, both without their prefixes."""
    keys = {key.partition(".")[2] for key in header.metadata}
    return keys | {(*name.split(".", 3), "", "")[2] for name in header.tensors if name.startswith("blk.")}


def _config(meta: _Metadata) -> dict[str, Any]:
    """The configuration that transformers' class of this architecture would have."""
    _refuse_unsupported(meta)
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    head_dim = meta.count("attention.key_length", hidden // heads)
    reads = meta.layout.reads
    if meta.count("attention.value_length", head_dim) != head_dim and not reads("attention.value_length"):
        raise meta.unsupported("its keys and values have heads of different sizes")
    epsilon = meta.get("attention.layer_norm_rms_epsilon") or meta.get("attention.layer_norm_epsilon")
    tensors = meta.header.tensors
    embedding = tensors.get("token_embd.weight")
    if epsilon is None or embedding is None or embedding.shape[-1] != hidden:
        reason = f"it lacks the norm's epsilon, or an embedding (token_embd.weight) of width {hidden}"
        raise ModelError("damaged", meta.path, reason, REMEDY)
    config = {
        "architectures": [meta.architecture],
        "model_type": meta.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.count("feed_forward_length"),
        "num_hidden_layers": meta.count("block_count", limit=MAX_LAYERS) - int(meta.get("nextn_predict_layers") or 0),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": float(epsilon),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in tensors),
        "mlp_bias": any(name.endswith(".ffn_gate.bias") for name in tensors),
        "use_sliding_window": False,
        "rope_parameters": _rope(meta, head_dim),
        "bos_token_id": meta.token("bos"),
        "eos_token_id": meta.token("eos"),
        "pad_token_id": meta.token("padding"),
        **meta.layout.constants,
        **{field: name in tensors for field, name in meta.layout.present.items()},
        **{field: meta.size(tensor, axis) for field, (tensor, axis) in meta.layout.sizes.items()},
        **{field: meta.field(key) for key, field in meta.layout.fields.items()},
        **{field: meta.field(key) for key, field in meta.layout.optional_fields.items() if meta.has(key)},
    }
    return config if meta.layout.complete is None else meta.layout.complete(config)


def _refuse_unsupported(meta: _Metadata) -> None:
    metadata = meta.header.metadata
    if metadata.get("general.type", "model") != "model":
        raise meta.unsupported(f"it holds a {metadata['general.type']}, not a whole model")
    window, context = meta.get("attention.sliding_window"), meta.get("context_length")
    reads_window = meta.layout.reads("attention.sliding_window")
    if window and context and window < context and not reads_window:
        raise meta.unsupported(f"metadata {meta.prefix}.attention.sliding_window = {window!r} is not implemented")
    for key in UNSUPPORTED_KEYS:
        if meta.get(key) and not meta.layout.reads(key):
            raise meta.unsupported(f"metadata {meta.prefix}.{key} = {meta.get(key)!r} is not implemented")
    for key, values in {**NEUTRAL, **meta.layout.implied}.items():
        if meta.has(key) and meta.get(key) not in values and not meta.layout.reads(key):
            raise meta.unsupported(f"metadata {meta.prefix}.{key} = {meta.get(key)!r} is not implemented")


def _rope(meta: _Metadata, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` as transformers names them. YaRN's attention factor is computed as in llama.cpp."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(meta.get("rope.freq_base") or 10000.0)}
    dim = meta.count("rope.dimension_count", head_dim)
    if dim != head_dim and meta.layout.permutes_heads:
        # The file's row order pairs dimensions across whole heads, so it does not show which dimensions are rotated.
        raise meta.unsupported(f"only {dim} of {head_dim} dimensions of its heads are rotated")
    if dim != head_dim:
        parameters["partial_rotary_factor"] = dim / head_dim
    kind, factor = meta.get("rope.scaling.type"), meta.get("rope.scaling.factor") or meta.get("rope.scale_linear")
    kind = kind or ("linear" if factor else "none")
    if ROPE_FREQ_FACTORS in meta.header.tensors:
        parameters |= {"rope_type": "freq_factors", "freq_factors": _floats(meta.header, ROPE_FREQ_FACTORS)}
    elif all(name in meta.header.tensors for name in LONG_ROPE_FACTORS):
        parameters |= _long_rope(meta)
    elif kind in ("linear", "yarn") and factor:
        parameters |= {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn":
            parameters |= _yarn(meta, float(factor))
    elif kind != "none":
        raise meta.unsupported(f"RoPE scaling {kind!r} with factor {factor!r} is not implemented for GGUF files")
    return parameters


def _long_rope(meta: _Metadata) -> dict[str, Any]:
    short, long = (_floats(meta.header, name) for name in LONG_ROPE_FACTORS)
    original = meta.count("rope.scaling.original_context_length")
    found = {"short_factor": short, "long_factor": long, "original_max_position_embeddings": original}
    scale = meta.get("rope.scaling.attn_factor")
    return {"rope_type": "longrope", **found} | ({} if scale is None else {"attention_factor": float(scale)})


def _yarn(meta: _Metadata, factor: float) -> dict[str, Any]:
    """The scale of latent attention is a number of its own, a tenth of that in Hugging Face's configuration."""
    found: dict[str, Any] = {
        "original_max_position_embeddings": meta.count("rope.scaling.original_context_length"),
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow") or 1.0,
    }
    if (scale := meta.get("rope.scaling.yarn_log_multiplier")) is not None:
        return found | dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * float(scale), 6))
    whole, scale = meta.get("rope.scaling.yarn_attn_factor"), float(meta.get("rope.scaling.attn_factor") or 1.0)
    return found | {"attention_factor": float(whole or scale * (0.1 * math.log(factor) + 1.0))}


def _floats(header: GGUFHeader, name: str) -> list[float]:
    """A small F32 tensor, read from the file."""
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.size > 65536:
        reason = f"tensor {name} has {tensor.size} bytes of type {tensor.type.name}"
        raise ModelError("unsupported_config", str(header.path), reason, REMEDY)
    with header.paths[tensor.file].open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.size // 4}f", file.read(tensor.size)))


def _stored_types(header: GGUFHeader) -> dict[str, int]:
    """The number of parameters that are stored in each type."""
    counts: Counter[str] = Counter()
    for tensor in needed_tensors(header).values():
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
