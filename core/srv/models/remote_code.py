"""Python code in the folder of a model, which some checkpoints bring for their layers or tokenizer. Torch-free.

Owns when it is run: only if the user says so, and if there are no native layers, or no tokenizer.json. Code of another
repository is never run. Facts: `auto_map` of config.json, or of tokenizer_config.json, names a class of the folder's
code per class of transformers ("AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"), with the repository if it is
in another one ("acme/code--modeling_acme.AcmeForCausalLM").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srv.errors import ModelError
from srv.models.families.trees import native_tree_of_model
from srv.specs import ModelFacts

OPTION = "--trust-remote-code"
CODE_OF_LAYERS, _CONFIG, _TOKENIZER = "AutoModelForCausalLM", "AutoConfig", "AutoTokenizer"


def code_of(facts: ModelFacts) -> Mapping[str, str]:
    """The classes in the folder's code, by those of transformers that they stand for; {} if there are none."""
    stated = facts.config.get("auto_map")
    given = stated if isinstance(stated, Mapping) else {}
    return {name: value for name, value in given.items() if isinstance(value, str)}


def code_files(facts: ModelFacts) -> str:
    """The Python files that define these classes, for messages."""
    return files_of(code_of(facts).values())


def files_of(classes: Iterable[str]) -> str:
    """The Python files of classes that `auto_map` names, for messages."""
    return ", ".join(sorted({_file(each) for each in classes}))


def _file(name: str) -> str:
    return f"{name.rpartition('--')[2].partition('.')[0]}.py"


def check_layer_code(facts: ModelFacts) -> None:
    """Raises ModelError remote_code if another repository has the code of the layers, or nothing has."""
    classes = code_of(facts)
    named = [classes[name] for name in (_CONFIG, CODE_OF_LAYERS) if name in classes]
    _check_own(named, facts.path, "layers")
    folder = Path(facts.path)
    absent = sorted({_file(each) for each in named if not (folder / _file(each)).is_file()})
    if absent and folder.is_dir():
        reason = f"its layers are Python code that is not in its folder ({', '.join(absent)})"
        remedy = f"Download the Python files of the model as well, and read them; {OPTION} runs them"
        raise ModelError("remote_code", facts.path, reason, remedy)


def tokenizer_classes(folder: Path) -> tuple[str, ...]:
    """The class in Python code that a folder names for its tokenizer; () if its tokenizer.json makes that unnecessary.

    Raises ModelError remote_code if another repository has the code.
    """
    if (folder / "tokenizer.json").is_file():
        return ()
    maps = [_stated(folder / name) for name in ("tokenizer_config.json", "config.json")]
    named = (each if isinstance(each, list) else each.get(_TOKENIZER) for each in maps if isinstance(each, list | dict))
    first = next((each for each in named if each), [])
    kinds = [each for each in ([first] if isinstance(first, str) else first) if isinstance(each, str)]
    _check_own(kinds[-1:], str(folder), "tokenizer")  # the faster one of two
    return tuple(kinds[-1:])


def _stated(file: Path) -> Any:
    """`auto_map` of a JSON file; None if it has none. Those who need other fields refuse damaged files."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return fields.get("auto_map") if isinstance(fields, dict) else None


def _check_own(classes: Iterable[str], path: str, part: str) -> None:
    for name in classes:
        repository, separator, _ = name.rpartition("--")
        if separator:
            reason = f"the code of its {part} is in the repository {repository}, and only code in its own folder is run"
            remedy = f"Read {_file(name)}, download it into the folder, and remove {repository}-- from auto_map"
            raise ModelError("remote_code", path, reason, remedy)


def may_run(facts: ModelFacts) -> bool:
    """Whether the class of the layers is in the folder, and the user lets its code run."""
    return facts.remote_code and CODE_OF_LAYERS in code_of(facts)


def runs_code(facts: ModelFacts, model_impl: str = "auto") -> bool:
    """Whether building the model runs code of its folder. `model_impl`: as in `srv.models.build.build`."""
    if not may_run(facts) or model_impl == "transformers":
        return may_run(facts)
    return isinstance(native_tree_of_model(facts), str)
