"""From a Hugging Face folder (`config.json`, safetensors headers) to model facts. Torch-free.

Owns the alternative names of configuration fields. Must not import transformers: facts are read before it is needed,
and for architectures that only transformers implements as well.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srv.errors import ModelError
from srv.models.architectures.registry import name_of_type, native_config, with_defaults
from srv.models.config.limits import MAX_LAYERS, MAX_SIZE
from srv.models.formats.safetensors_header import Checkpoint, read_checkpoint
from srv.models.layers.rope_config import UnsupportedConfig, usable_context
from srv.quantization import registry as quantization
from srv.specs import ModelFacts, attention_groups

# Field names of the same quantity in different configurations, the most common first.
FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "hidden_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx"),
}
# Configuration fields of models that have state other than keys and values.
OTHER_STATE_FIELDS = ("kv_lora_rank", "ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads", "rwkv_version")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
REMEDY = "Use the folder of a causal language model that transformers supports"


def read_folder(path: Path) -> ModelFacts:
    """Facts of a folder. Raises ModelError: not_found, damaged, truncated, unknown_architecture, unsupported_*."""
    config = _json(path / "config.json")
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        _refuse_pickles(path)
    try:
        return _facts(path, config, checkpoint)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = f"config.json holds an invalid value ({type(error).__name__}: {error})"
        raise ModelError("unsupported_config", str(path), reason, REMEDY) from error


def _facts(path: Path, config: Mapping[str, Any], checkpoint: Checkpoint | None) -> ModelFacts:
    architecture = _architecture(path, config)
    sizes = _sizes(path, architecture, config)
    stored_types = _stored_types(checkpoint)
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    context = usable_context(_text_config(config), sizes["context"])
    return ModelFacts(
        name=_name(path),
        path=str(path.absolute()),
        format="config" if checkpoint is None else "safetensors",
        architecture=architecture,
        config=with_defaults(architecture, config),
        dtype=_dtype(config, stored_types),
        quantization=quantization.detect(path, _text_config(config)),
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        layers=sizes["layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        parameters=sum(stored_types.values()) if checkpoint else _parameters(architecture, config, sizes),
        weight_bytes=sum(tensor.size for tensor in checkpoint.tensors.values()) if checkpoint else 0,
        cache_groups=attention_groups(
            _windows(architecture, config, sizes["layers"]), kv_heads, head_dim, head_dim, context
        ),
        end_tokens=_end_tokens(with_defaults(architecture, config), generation),
        stored_types=stored_types,
        pooling=_pooling(path),
    )


def _pooling(path: Path) -> str | None:
    """The pooling of a sentence-transformers folder: "last", "mean", or the names of its modes; None elsewhere.

    Facts: `1_Pooling/config.json` of sentence-transformers has one boolean per mode, of which one is usually true.
    """
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return None
    prefix = "pooling_mode_"
    enabled = [name.removeprefix(prefix) for name, on in _json(file).items() if name.startswith(prefix) and on is True]
    modes = ["last" if name == "lasttoken" else name.removesuffix("_tokens").removesuffix("_token") for name in enabled]
    return "+".join(modes) or None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Give a Hugging Face folder that this user may read"
        raise ModelError("not_found", str(path), f"it cannot be read ({error.strerror})", remedy) from error
    except ValueError as error:
        raise ModelError("damaged", str(path), f"it is not JSON ({error})", "Fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError("damaged", str(path), f"it is a JSON {type(value).__name__}", "Fetch the file again")
    return value


def _refuse_pickles(path: Path) -> None:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        reason = f"its weights are in pickle files ({pickles[0]}), which can run code when they are loaded"
        remedy = "Convert them to safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        raise ModelError("unsupported_format", str(path), reason, remedy)


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    if (name := name_of_type(config.get("model_type"))) is not None:
        return name
    reason = f"config.json names no architecture (model_type is {config.get('model_type')!r})"
    raise ModelError("unknown_architecture", str(path), reason, "Add `architectures` to config.json")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model, which multimodal models nest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _sizes(path: Path, architecture: str, config: Mapping[str, Any]) -> dict[str, int]:
    text = with_defaults(architecture, _text_config(config))
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    foreign = [name for name in OTHER_STATE_FIELDS if text.get(name)] + sorted(set(kinds) - ATTENTION_LAYERS)
    if foreign:
        reason = f"{architecture} has state other than keys and values ({', '.join(foreign)})"
        raise ModelError("unsupported_config", str(path), reason, REMEDY)
    sizes: dict[str, int] = {}
    for quantity, names in FIELD_NAMES.items():
        value = next((text[name] for name in names if text.get(name) is not None), None)
        limit = MAX_LAYERS if quantity == "layers" else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            reason = f"config.json gives {value!r} for its {quantity} ({' or '.join(names)})"
            raise ModelError("unsupported_config", str(path), reason, REMEDY)
        sizes[quantity] = value
    sizes["head_dim"] = int(text.get("head_dim") or sizes["hidden_size"] // sizes["heads"])
    sizes["kv_heads"] = _kv_heads(text, sizes["heads"])
    return sizes


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    if text.get("model_type") == "falcon" and not text.get("new_decoder_architecture"):
        return heads
    given = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return int(given or heads)


def _dtype(config: Mapping[str, Any], stored_types: Mapping[str, int]) -> str:
    """The dtype of most of the stored parameters; without weights, that of the configuration."""
    counts = {dtype: stored_types.get(dtype, 0) for dtype in ("float64", "float32", "float16", "bfloat16")}
    if any(counts.values()):
        return max(counts, key=lambda name: counts[name])
    text = _text_config(config)
    return str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch.")


def _stored_types(checkpoint: Checkpoint | None) -> dict[str, int]:
    """The number of parameters that are stored in each dtype."""
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values() if checkpoint else ():
        counts[tensor.dtype] += math.prod(tensor.shape)
    return dict(counts)


def _parameters(architecture: str, config: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """The parameter count of the native layers, else an estimate of 12 h² per layer."""
    try:
        return native_config(architecture, config).parameters
    except UnsupportedConfig:
        hidden = sizes["hidden_size"]
        return sizes["vocab_size"] * hidden + sizes["layers"] * 12 * hidden * hidden


def _windows(architecture: str, config: Mapping[str, Any], layers: int) -> Sequence[int | None]:
    """The sliding window of each layer: that of the native layers, else by the fields that transformers has for it.

    A layer whose window these fields do not tell counts as one with full attention, which masks what is outside.
    """
    try:
        return [layer.window for layer in native_config(architecture, config).attention_layers]
    except UnsupportedConfig:
        text = _text_config(config)
        types, window = text.get("layer_types"), text.get("sliding_window")
        if not isinstance(types, list) or len(types) != layers or not isinstance(window, int) or window < 1:
            return (None,) * layers
        return [window if kind == "sliding_attention" else None for kind in types]


def _end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens; those of `generation_config.json` take precedence, as in transformers."""
    given = generation.get("eos_token_id")
    if given is None:
        given = _text_config(config).get("eos_token_id")
    many = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(token for token in map(_token, many) if token is not None))


def _token(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _name(path: Path) -> str:
    """The folder's name, or the hub id if it is in the hub's cache (models--org--name/snapshots/hash)."""
    for parent in path.absolute().parents:
        if parent.name.startswith("models--") and path.absolute().parent.name == "snapshots":
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.absolute().name
