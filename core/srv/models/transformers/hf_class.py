"""Which class of transformers computes a model, and its configuration, without weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from srv.errors import ModelError, SrvError
from srv.models.families.registry import encoder_names, is_native
from srv.models.families.trees import native_tree_of_model
from srv.models.options import UNTIED, merged
from srv.models.remote_code import CODE_OF_LAYERS, OPTION, check_layer_code, code_files, code_of, may_run
from srv.models.transformers.hf_attention import IMPLEMENTATION, build_error, unsupported
from srv.models.transformers.hf_claims import NO_BACKENDS
from srv.specs import ModelFacts

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 300  # of an error of transformers, in our errors


@contextmanager
def build_errors(facts: ModelFacts) -> Iterator[None]:
    """Turn what transformers raises while it builds a model, which may be anything, into a ModelError."""
    try:
        yield
    except (SrvError, MemoryError):
        raise
    except Exception as error:
        # Some classes look up the implementation in their own table, and fail.
        unknown = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        if unknown:
            raise unsupported(facts.architecture, NO_BACKENDS) from error
        native = native_tree_of_model(facts) if is_native(facts.architecture) else None
        why = f"its native layers do not compute it: {native}; " if isinstance(native, str) else ""
        raise build_error(facts.architecture, why, _explained(error, facts.config)) from error


def _explained(error: Exception, config: Mapping[str, Any]) -> str:
    """What transformers raised; a value of the configuration that it looked up in vain has the name of its field."""
    fields = [] if not isinstance(error, KeyError) or not error.args else list(_fields_with(error.args[0], config))
    if fields:
        return f"{' and '.join(fields)} is {error.args[0]!r:.80}, which it does not know"
    return f"{type(error).__name__}: {_first_line(error)}"


def _fields_with(value: object, config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The names of the fields that hold a text, those of nested objects with what they are in."""
    for name, each in config.items():
        if isinstance(each, Mapping):
            yield from _fields_with(value, each, f"{prefix}{name}.")
        elif isinstance(value, str) and each == value:
            yield f"{prefix}{name}"


def check_known(facts: ModelFacts) -> None:
    """Refuse an architecture that transformers does not have either; its own message would be very long."""
    model_type = facts.config.get("model_type")
    if may_run(facts):
        log.warning("Python code of the model is run: %s in %s", code_files(facts), facts.path)
        return
    if CODE_OF_LAYERS in code_of(facts) and model_type not in CONFIG_MAPPING:
        check_layer_code(facts)
        reason = f"its layers are Python code in its folder ({code_files(facts)}), which is not run"
        remedy = f"Read the code; {OPTION} runs it, with all that this user may do"
        raise ModelError("remote_code", f"{facts.architecture} ({facts.path})", reason, remedy)
    if foreign := sorted(name for name in code_of(facts) if name.startswith("AutoModel") and name != CODE_OF_LAYERS):
        _check_own_class(facts, foreign)
    if model_type in CONFIG_MAPPING and (
        CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING or class_of(facts) is not AutoModelForCausalLM
    ):
        return
    known, release = model_type in CONFIG_MAPPING, f"transformers {transformers.__version__}"
    lack = "has no causal model of that type" if known else "does not know that type"
    lack = f"{release} {lack} (model_type {model_type!r})"
    native = native_tree_of_model(facts) if is_native(facts.architecture) else None
    if isinstance(native, str):
        reason = f"its native layers do not compute it: {native}; {lack}, so that its class cannot be used instead"
        remedy = "Use another checkpoint of the model"
    elif native is not None:
        reason, remedy = f"{lack}, and only srv's own layers compute it", "Leave out --model-impl, or pass auto"
    elif known:
        reason = f"{lack}, and srv has no native layers for it, by which alone encoders are computed"
        remedy = f"Serve a causal model, or an encoder of a class that has them ({', '.join(encoder_names())})"
    else:
        reason = f"srv has no such architecture, and {lack}"
        remedy = (
            "Serve a Llama, Mistral or Qwen model or a causal one that transformers knows, or install a newer release"
        )
    raise ModelError("unsupported_architecture", f"{facts.architecture} ({facts.path})", reason, remedy)


def _check_own_class(facts: ModelFacts, named: Sequence[str]) -> None:
    """Refuse a class that only Python code defines, and of which it has no causal model. `named`: what it has."""
    if hasattr(transformers, facts.architecture) or CODE_OF_LAYERS in code_of(facts) or is_native(facts.architecture):
        return
    reason = f"it is defined by Python code ({code_files(facts)}), which has no {CODE_OF_LAYERS} but {', '.join(named)}"
    reason += ", and srv has no native layers for it, by which alone encoders are computed"
    remedy = f"Serve a causal model, or an encoder of a class that has them ({', '.join(encoder_names())})"
    raise ModelError("unsupported_architecture", f"{facts.architecture} ({facts.path})", reason, remedy)


def class_of(facts: ModelFacts) -> Any:
    """The class that the configuration names if it generates from configurations of this type, else that of its type.

    The causal classes of some models belong to the type of a part, for which transformers lists none.
    """
    if facts.config["model_type"] not in CONFIG_MAPPING:
        return AutoModelForCausalLM  # which finds the code in the folder
    named, config = getattr(transformers, facts.architecture, None), CONFIG_MAPPING[facts.config["model_type"]]
    listed_one = config in MODEL_FOR_CAUSAL_LM_MAPPING
    fits = isinstance(named, type) and getattr(named, "config_class", None) is config and hasattr(named, "generate")
    return named if fits and not listed_one else AutoModelForCausalLM


def make_model(facts: ModelFacts, config: Any, **options: Any) -> Any:
    """The model without loaded weights."""
    made = class_of(facts)
    if made is not AutoModelForCausalLM:
        return made._from_config(config, attn_implementation=IMPLEMENTATION, **options)
    options["trust_remote_code"] = may_run(facts)
    return made.from_config(config, attn_implementation=IMPLEMENTATION, **options)


def _first_line(error: Exception) -> str:
    """The first line of an error message, limited in length."""
    line, _, rest = str(error).strip().partition("\n")
    if line.endswith(":"):
        line += f" {rest.strip()}"
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + "..."


def config_of(facts: ModelFacts) -> Any:
    """The configuration as transformers reads it. Raises ModelError for what it would ignore in one of a GGUF file."""
    fields = {name: value for name, value in facts.config.items() if name not in ("model_type", "torch_dtype")}
    if facts.text_part_of is not None:
        return AutoConfig.for_model(facts.config["model_type"], **fields)
    if facts.format != "gguf":
        return _of_folder(facts)
    rope = fields["rope_parameters"]
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # one of all layers, or of each kind
    if any(each["rope_type"] == "freq_factors" for each in kinds):
        raise unsupported(
            facts.architecture, "transformers does not support the RoPE frequency factors of this GGUF file"
        )
    if any("partial_rotary_factor" in each for each in kinds):
        raise unsupported(facts.architecture, "transformers ignores that this GGUF file rotates a part of each head")
    return AutoConfig.for_model(facts.config["model_type"], **fields)


def drop_quantization(config: Any) -> None:
    """Remove what would make transformers read quantized weights itself."""
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)


def _of_folder(facts: ModelFacts) -> Any:
    """The configuration in a folder, with the user's other values, and tied only if the weights are."""
    config = AutoConfig.from_pretrained(facts.path, local_files_only=True, trust_remote_code=may_run(facts))
    overrides = {**facts.overrides, **(UNTIED if facts.untied else {})}
    if not overrides:
        return config
    stored, _ = PreTrainedConfig.get_config_dict(facts.path, local_files_only=True)
    fields = merged(stored, overrides)
    kind = CONFIG_MAPPING[fields["model_type"]] if "model_type" in facts.overrides else type(config)
    return kind.from_dict({**fields, "_name_or_path": facts.path})
