"""From a Hugging Face folder (`config.json`, safetensors headers) to model facts. Torch-free.

Owns the alternative names of configuration fields. Must not import transformers: facts are read before it is needed,
and for architectures that only transformers implements as well.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from srv.dtypes import FLOAT8, FLOATS, ITEM_SIZES
from srv.errors import ModelError
from srv.limits import SMALLEST_REQUEST
from srv.models import derive
from srv.models.blueprint import Part
from srv.models.checkpoints.output_layer import has_head, has_separate_head
from srv.models.checkpoints.safetensors_header import Checkpoint, read_checkpoint
from srv.models.checkpoints.text_names import OUTPUT_LAYER, is_tied, is_unread
from srv.models.config import layer_fields, unserved
from srv.models.config.field_types import check_fields, check_own_fields
from srv.models.config.known_sizes import KnownSizes, known_sizes, weight_sizes
from srv.models.config.layer_fields import Heads
from srv.models.config.limits import MAX_SIZE
from srv.models.config.overrides import overridden
from srv.models.config.sentence import MODULES, read_sentence
from srv.models.config.text_part import text_config, vision_class
from srv.models.facts.layer_names import layer_names
from srv.models.families.registry import (
    class_of_type,
    counts_from_padding,
    is_native,
    known_name,
    named_class,
    with_defaults,
)
from srv.models.families.trees import MAX_LAYERS, native_tree, native_tree_or_reason, pooled_of
from srv.models.layers.rope_config import usable_context
from srv.models.options import DEFAULT_OPTIONS, TIED, UNTIED, ReadOptions, merged
from srv.models.unsupported import CORRECT, InvalidConfig, UnsupportedConfig
from srv.quantization import registry as quantization
from srv.quantization.formats.stated_fields import FIELD, read_quantization
from srv.quantization.formats.tool_files import MODELOPT, modelopt_file, with_tool_file
from srv.specs import CacheSpec, ModelFacts

# Field names of the same quantity in different configurations, the most common first.
FIELD_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "hidden_dim", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "context": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "n_ctx",
        "model_max_length",
    ),
}
# Configuration fields of models that have state other than keys and values.
OTHER_STATE_FIELDS = ("kv_lora_rank", "ssm_cfg", "state_size", "mamba_d_state", "linear_num_key_heads", "rwkv_version")
ENCODER_DECODER_FIELDS = ("decoder_layers", "num_decoder_layers", "decoder_attention_heads")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
DTYPES = (*FLOATS, *FLOAT8.values(), "auto")  # that a configuration may name: of any but the first, layers choose one
GENERATES, ALONE = "ForCausalLM", "Model"  # ends of the names of classes with an output layer, and without
REMEDY = "Serve a model with native layers, or one of transformers whose layers all use causal attention"


def read_folder(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> ModelFacts:
    """Facts of a folder. Raises ModelError: not_found, damaged, truncated, unknown_*, unsupported_*."""
    config = _json(path / "config.json")
    check_fields(str(path / "config.json"), config)
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        _refuse_pickles(path)
    config = with_tool_file(path, config, None if checkpoint is None else checkpoint.tensors)
    try:
        whole = vision_class(config)
        if whole is not None:
            config = text_config(config)
        config = overridden(str(path), config, options.overrides)
        config = read_quantization(str(path / "config.json"), config, text_part=whole is not None)
        alone = _class_without_head(_architecture(path, config), config, checkpoint, whole, (path / MODULES).is_file())
        config = config if alone is None else {**config, "architectures": [alone]}
        untied = _is_untied(_architecture(path, config), config, checkpoint, whole, options)
        facts = _facts(path, merged(config, UNTIED) if untied else config, checkpoint, whole)
        overrides = dict(options.overrides)
        facts = replace(facts, untied=untied, headless=alone is not None)
        return replace(facts, overrides=overrides, remote_code=options.remote_code)
    except InvalidConfig as error:
        raise ModelError("unsupported_config", str(path), f"in config.json, {error}", CORRECT) from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"config.json holds an invalid value ({type(error).__name__}: {error})"
        raise ModelError("unsupported_config", str(path), reason, CORRECT) from error


def _facts(path: Path, config: Mapping[str, Any], checkpoint: Checkpoint | None, whole: str | None) -> ModelFacts:
    """`whole`: the class of the vision model whose language model `config` describes, or None."""
    architecture = _architecture(path, config)
    check_own_fields(str(path / "config.json"), architecture, _text_config(config))
    if checkpoint is not None:
        text = with_defaults(architecture, _text_config(config))
        checkpoint = _needed(checkpoint, layer_names(architecture, whole), text)
    stored_types = _stored_types(checkpoint)
    method = quantization.detect(path, _text_config(config))
    stated = _stated_dtype(path, config, stored_types, method)
    model = known_sizes(architecture, config, stated)
    dtype = stated or model.dtype
    sizes = _sizes(path, architecture, config, model)
    native = _native(architecture, config)
    if native is not None:
        sizes |= derive.head_sizes(native)
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    pooled = None if native is None else pooled_of(architecture, config)
    given = usable_context(_text_config(config), sizes["context"] - _unused_positions(architecture, config))
    context = pooled.positions if pooled and pooled.positions else given
    sentence = read_sentence(path, config, sizes["hidden_size"], 0 if pooled is None else pooled.labels)
    context = min(context, sentence.max_tokens or context)
    if context < SMALLEST_REQUEST:
        raise _too_short(path, config, context)
    own_file = {FIELD: modelopt_file(path)} if FIELD not in config and method == MODELOPT else {}
    weights = weight_sizes(model, {**config, **own_file}, dtype, method, checkpoint, stored_types)
    return ModelFacts(
        name=_name(path),
        path=str(path.absolute()),
        format="config" if checkpoint is None else "safetensors",
        architecture=architecture,
        config=with_defaults(architecture, config),
        dtype=dtype,
        quantization=method,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        layers=sizes["layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        parameters=weights.parameters,
        weight_bytes=weights.bytes,
        cache_groups=_cache_groups(model, native, config, sizes, context, dtype),
        end_tokens=_end_tokens(with_defaults(architecture, config), generation),
        stored_types=weights.types,
        pooling=pooled.pooled_by if pooled and (pooled.labels or not sentence.pooling) else sentence.pooling,
        text_part_of=whole,
        active_parameters=model.active_parameters,
        unknown_sizes=weights.unknown,
        generates=pooled is None,
        head=sentence.head,
        assumes_dtype=stated is None,
    )


def _too_short(path: Path, config: Mapping[str, Any], context: int) -> ModelError:
    """The refusal of a model in which no request has room."""
    text = _text_config(config)
    stated = [f"{name} is {text[name]!r}" for name in FIELD_NAMES["context"] if text.get(name) is not None]
    reason = f"its context of {context} tokens has no room for a request, which takes {SMALLEST_REQUEST} at least"
    reason += f": in config.json, {stated[0]}" if stated else ""
    return ModelError("unsupported_config", str(path), reason, CORRECT)


def _class_without_head(
    architecture: str, config: Mapping[str, Any], checkpoint: Checkpoint | None, whole: str | None, embeds: bool
) -> str | None:
    """The class of a decoder alone, if the configuration names the one with an output layer that the weights lack.

    Embedding models are published so (Qwen3-Embedding-8B). `embeds`: weights that are not there lack it, because the
    folder has the modules of sentence-transformers.
    """
    alone = architecture.removesuffix(GENERATES) + ALONE
    if not architecture.endswith(GENERATES) or not is_native(alone):
        return None
    if is_tied(with_defaults(architecture, _text_config(config))):
        return None
    if checkpoint is None:
        return alone if embeds else None
    rename = layer_names(architecture, whole)
    names = {each: name for each in checkpoint.tensors if (name := rename(each))}
    return None if has_head(names) else alone


def _is_untied(
    architecture: str, config: Mapping[str, Any], checkpoint: Checkpoint | None, whole: str | None, options: ReadOptions
) -> bool:
    """Whether the weights have an output layer of their own that the configuration, but not the user, leaves out."""
    if checkpoint is None or options.headers_only or TIED in options.overrides:
        return False
    if not is_tied(with_defaults(architecture, _text_config(config))):
        return False
    rename = layer_names(architecture, whole)
    return has_separate_head(checkpoint, {each: name for each in checkpoint.tensors if (name := rename(each))})


def _needed(checkpoint: Checkpoint, name: Callable[[str], str | None], text: Mapping[str, Any]) -> Checkpoint:
    """Without the tensors that the model does not need. `text`: the configuration of the language model."""
    names = {each: found for each in checkpoint.tensors if (found := name(each))}
    skipped = OUTPUT_LAYER if is_tied(text) else ()
    kept = [each for each, found in names.items() if not found.startswith(skipped) and not is_unread(found, text)]
    return replace(checkpoint, tensors={each: checkpoint.tensors[each] for each in kept})


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Give a Hugging Face folder that this user may read"
        raise ModelError("not_found", str(path), f"it cannot be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:  # the latter: it is nested too deeply
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
    if (named := named_class(config)) is not None:
        return known_name(named, config)
    if (name := class_of_type(config.get("model_type"))) is not None and is_native(name):
        return name
    reason = f"config.json names no architecture (model_type is {config.get('model_type')!r})"
    raise ModelError("unknown_architecture", str(path), reason, "Add `architectures` to config.json")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model, which multimodal models nest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def _sizes(path: Path, architecture: str, config: Mapping[str, Any], model: KnownSizes) -> dict[str, int]:
    text = with_defaults(architecture, _text_config(config))
    if not is_native(architecture) and (lacking := unserved.reason_of(config)) is not None:
        raise ModelError("unsupported_config", str(path), f"{architecture} {lacking}", REMEDY)
    if any(text.get(name) for name in ENCODER_DECODER_FIELDS):
        reason = f"{architecture} belongs to an encoder-decoder, whose decoder attends to what an encoder computes"
        raise ModelError("unsupported_config", str(path), reason, REMEDY)
    kinds = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types") or ()
    foreign = [name for name in OTHER_STATE_FIELDS if text.get(name)] + sorted(set(kinds) - ATTENTION_LAYERS)
    foreign = [name for name in foreign if name != "kv_lora_rank" or not layer_fields.latent_head(text)]
    if kinds and set(kinds) <= ATTENTION_LAYERS:  # Granite 4 has models without the layers that the sizes are of
        foreign = [name for name in foreign if name != "mamba_d_state"]
    if foreign and (not model.known or (is_native(architecture) and not model.keeps_other_states)):
        reason = f"{architecture} has state other than keys and values ({', '.join(foreign)})"
        if is_native(architecture) and isinstance(native := native_tree_or_reason(architecture, text), str):
            reason = f"{architecture} cannot be computed: {native}"
            raise ModelError("unsupported_config", str(path), reason, CORRECT)
        raise ModelError("unsupported_config", str(path), reason, REMEDY)
    sizes: dict[str, int] = {}
    for quantity, names in FIELD_NAMES.items():
        value = next((text[name] for name in names if text.get(name) is not None), None)
        value = model.default(quantity) if value is None else value
        if quantity == "layers" and value is None:
            value = len(kinds or text.get("hybrid_override_pattern") or ()) or None
        limit = MAX_LAYERS if quantity == "layers" else MAX_SIZE
        times = layer_fields.attentions_per_layer(text) if quantity == "layers" else 1
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value * times <= limit:
            if value is None and not is_native(architecture) and config.get("auto_map"):
                reason = f"{architecture} is defined by Python code in its folder (auto_map), whose configuration does "
                reason += f"not state its {quantity} ({' or '.join(names)})"
                raise ModelError("unsupported_config", str(path), reason, REMEDY)
            reason = f"config.json gives {value!r:.80} for its {quantity} ({' or '.join(names)})"
            reason += f", and each attends {times} times" if times != 1 else ""
            raise ModelError("unsupported_config", str(path), reason, CORRECT)
        sizes[quantity] = value * times
    sizes |= layer_fields.common_heads(text, sizes["hidden_size"], sizes["heads"])._asdict()
    return sizes | model.head_sizes()


def _unused_positions(architecture: str, config: Mapping[str, Any]) -> int:
    """The positions before a sequence's first token, which RoBERTa and its kin leave to padding."""
    if not counts_from_padding(architecture, config.get("model_type")):
        return 0
    padding = config.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1


def _stated_dtype(
    path: Path, config: Mapping[str, Any], stored_types: Mapping[str, int], method: str | None
) -> str | None:
    """The dtype of most of the stored parameters; without weights, that of the configuration or of the method."""
    counts = {dtype: stored_types.get(dtype, 0) for dtype in FLOATS}
    if any(counts.values()):
        return max(counts, key=lambda name: counts[name])
    text = _text_config(config)
    known = quantization.find(method)
    field = next((name for name in ("dtype", "torch_dtype") if text.get(name)), "")
    if not field:
        return None if known is None else known.dtype or None
    stated = str(text[field]).removeprefix("torch.")
    if stated not in DTYPES:
        reason = f"config.json says that {field} is {text[field]!r:.80}; it must be one of {', '.join(FLOATS)}"
        raise ModelError("unsupported_config", str(path), reason, CORRECT)
    return stated


def _stored_types(checkpoint: Checkpoint | None) -> dict[str, int]:
    """The number of parameters that are stored in each dtype."""
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values() if checkpoint else ():
        counts[tensor.dtype] += math.prod(tensor.shape)
    return dict(counts)


def _native(architecture: str, config: Mapping[str, Any]) -> Part | None:
    """The blueprint of the native layers, if there are any."""
    try:
        return native_tree(architecture, config)
    except UnsupportedConfig:
        return None


def _cache_groups(
    model: KnownSizes,
    native: Part | None,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    context: int,
    dtype: str,
) -> tuple[CacheSpec, ...]:
    heads = Heads(sizes["kv_heads"], sizes["head_dim"])
    if native is None:
        return model.pool_groups(context) or layer_fields.cache_groups(
            _text_config(config), sizes["layers"], heads, context
        )
    return derive.cache_groups(native, context, dtype if dtype in ITEM_SIZES else "float32")


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
