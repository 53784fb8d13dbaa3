"""What the files of an embedding model or a cross-encoder say about pooling and what follows it. Torch-free.

Facts: the files of sentence-transformers. `modules.json` lists the modules in order, each with its folder; a pooling
module's `config.json` has one boolean per mode; `config_sentence_transformers.json` has the prompts;
`sentence_bert_config.json`, beside the transformer, says where texts are cut; a cross-encoder's activation is in
`config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from srv.errors import ModelError
from srv.types import DenseLayer, PooledHead

MODULES = "modules.json"
DENSE_WEIGHTS = "model.safetensors"
_MODE = "pooling_mode_"
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid"}
_SCORES = ("LogitScore", "CausalScoreHead")  # the newer and the older name of one module
_NO_EFFECT = ("Transformer", "Pooling", "Dropout", *_SCORES)


class _Module(NamedTuple):
    """`kind`: the last part of its class. `config`: {} if it has none."""

    kind: str
    folder: str
    config: Mapping[str, Any]


class Sentence(NamedTuple):
    """`pooling`: as `ModelFacts.pooling`. `max_tokens`: of a text, if the files limit it."""

    pooling: str | None
    head: PooledHead
    max_tokens: int | None


def read_sentence(path: Path, config: Mapping[str, Any], hidden_size: int, labels: int) -> Sentence:
    """What the folder of a model says; `labels`: how many its classification head has.

    Raises ModelError (damaged) for a file that is not what it should be.
    """
    modules = _modules(path)
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    given = _object(path / "1_Pooling" / "config.json") if pooling is None else pooling.config
    prompts, default = _prompts(path / "config_sentence_transformers.json")
    modes = _modes(given)
    dense, unsupported, missing = _dense(path, modules, hidden_size * max(1, len(modes)))
    max_tokens, lower_case = _transformer(path, modules)
    head = PooledHead(
        normalize=not modules or any(module.kind == "Normalize" for module in modules),
        dense=dense,
        dimensions=_dimensions(config),
        prompts=tuple(prompts.items()),
        default_prompt=default,
        prompt_pooled=given.get("include_prompt") is not False,
        labels=_labels(config, labels),
        activation=_activation(config, labels),
        yes_no=_yes_no(modules),
        lower_case=lower_case,
        unsupported=unsupported,
        missing=missing,
    )
    # Several modes are joined by "+", which no value of `srv.types.Pooling` is.
    return Sentence("+".join(modes) or None, head, max_tokens)


def _prompts(file: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the one that inputs get by themselves."""
    config = _object(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise _damaged(file, "its prompts are not an object of texts")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise _damaged(file, f"its default_prompt_name, {default!r}, is not the name of one of its prompts")
    return prompts, default


def _transformer(path: Path, modules: Sequence[_Module]) -> tuple[int | None, bool]:
    """How many tokens of a text the transformer reads, if its file says so, and whether texts are in lower case."""
    folder = next((path / module.folder for module in modules if module.kind == "Transformer"), None)
    file = None if folder is None else next(iter(sorted(folder.glob("sentence_*_config.json"))), None)
    if file is None:
        return None, False
    config = _object(file)
    length, lower_case = config.get("max_seq_length"), config.get("do_lower_case")
    if length is not None and (type(length) is not int or length < 1):
        raise _damaged(file, f"its max_seq_length, {length!r}, is not a positive integer")
    if lower_case is not None and not isinstance(lower_case, bool):
        raise _damaged(file, f"its do_lower_case, {lower_case!r}, is not a boolean")
    return length, bool(lower_case)


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The modes of a pooling module."""
    newer = config.get("pooling_mode")
    enabled = [newer] if isinstance(newer, str) else []
    enabled += [name.removeprefix(_MODE) for name, on in config.items() if name.startswith(_MODE) and on is True]
    modes = ["last" if name == "lasttoken" else name.removesuffix("_tokens").removesuffix("_token") for name in enabled]
    return list(dict.fromkeys(modes))  # files may say it in the newer and the older way


def _modules(path: Path) -> list[_Module]:
    file = path / MODULES
    listed = _load(file) if file.is_file() else []
    if not isinstance(listed, list) or not all(map(_is_module, listed)):
        raise _damaged(file, "it is not a list of objects with the texts type and path")
    found: list[_Module] = []
    for each in listed:
        kind, folder = each["type"].rpartition(".")[2], each["path"]
        if folder and not _inside(folder):
            raise _damaged(file, f"the path {folder!r} leaves the folder of the model")
        found.append(_Module(kind, folder, _object(path / folder / "config.json") if folder else {}))
    return found


def _is_module(listed: object) -> bool:
    return isinstance(listed, dict) and all(isinstance(listed.get(name), str) for name in ("type", "path"))


def _inside(folder: str) -> bool:
    parts = Path(folder).parts
    return not Path(folder).is_absolute() and ".." not in parts


def _dense(path: Path, modules: Sequence[_Module], size: int) -> tuple[tuple[DenseLayer, ...], str, str]:
    """The dense layers, a clause that says which module is not computed, and the file that one lacks, or "" for none.

    `size`: what is pooled.
    """
    layers: list[DenseLayer] = []
    normalized = False
    for module in modules:
        if module.kind == "Normalize":
            normalized = True
        elif module.kind == "Dense":
            activation = str(module.config.get("activation_function", "Tanh")).rpartition(".")[2]
            sizes = [module.config.get(name) for name in ("in_features", "out_features")]
            if normalized:
                return (), f"its dense layer {module.folder} follows the norm", ""
            if activation not in _ACTIVATIONS:
                return (), f"the activation {activation} of {module.folder} is not one of {', '.join(_ACTIVATIONS)}", ""
            if not all(isinstance(size, int) and size > 0 for size in sizes):
                return (), f"{module.folder}/config.json has no in_features and out_features", ""
            inputs, outputs = int(sizes[0] or 0), int(sizes[1] or 0)
            if inputs != size:
                return (), f"{module.folder} reads {inputs} elements, and {size} precede it", ""
            if not (path / module.folder / DENSE_WEIGHTS).is_file():
                file = f"{module.folder}/{DENSE_WEIGHTS}"
                return (), f"its weights {file} are missing", file
            size = outputs
            bias = module.config.get("bias") is not False
            layers.append(DenseLayer(module.folder, inputs, outputs, bias, _ACTIVATIONS[activation]))
        elif module.kind not in _NO_EFFECT:
            return (), f"its module {module.folder or module.kind} ({module.kind}) is not implemented", ""
    return tuple(layers), "", ""


def _yes_no(modules: Sequence[_Module]) -> tuple[int, ...]:
    for module in modules:
        if module.kind in _SCORES:
            tokens = [module.config.get(name) for name in ("true_token_id", "false_token_id")]
            if all(isinstance(token, int) and token >= 0 for token in tokens):
                return tuple(tokens)  # type: ignore[arg-type]
    return ()


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...]:
    given = config.get("matryoshka_dimensions")
    if not isinstance(given, list) or not all(isinstance(size, int) and size > 0 for size in given):
        return ()
    return tuple(sorted(given))


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    names = config.get("id2label")
    names = names if isinstance(names, Mapping) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _activation(config: Mapping[str, Any], labels: int) -> str:
    """How logits of labels become scores: as a cross-encoder says, else by the kind of its problem."""
    stated = config.get("sentence_transformers")
    named = stated.get("activation_fn") if isinstance(stated, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str) and named.rpartition(".")[2] in ("Identity", "Sigmoid"):
        return _ACTIVATIONS[named.rpartition(".")[2]]
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels <= 1 or problem == "multi_label_classification" else "softmax"


def _object(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file; {} without it."""
    value = _load(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise _damaged(file, f"it is a JSON {type(value).__name__}")
    return value


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Give a Hugging Face folder that this user may read"
        raise ModelError("not_found", str(file), f"it cannot be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:  # the latter: it is nested too deeply
        raise _damaged(file, f"it is not JSON ({error})") from error


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError("damaged", str(file), reason, "Fetch the file again")
