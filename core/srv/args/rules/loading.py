"""Rules for how weight files are found, read and removed: what has no effect, and the settings of the loader.

--model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 8}'
"""

from __future__ import annotations

import json
from typing import Any

from srv.args.groups.weights import WeightsArgs
from srv.models.checkpoints.reading import Reading
from srv.models.checkpoints.third_party import LOADERS, refusal
from srv.models.families.trees import native_tree_of_model
from srv.models.locate import on_hub
from srv.platform.facts import Constraint, ResolutionContext

_ON, _THREADS = "enable_multithread_load", "num_threads"
_DEFAULT_THREADS, _MOST_THREADS = 8, 256


def reading_of(weights: WeightsArgs) -> Reading:
    """How weight files are read. Raises ValueError, which a constraint has raised before."""
    return Reading(not weights.weight_loader_disable_mmap, _threads(weights.model_loader_extra_config))


def _threads(text: str) -> int:
    """The threads that load weights, from a JSON object. ValueError with a clause for settings that there are not."""
    settings: dict[str, Any] = json.loads(text)
    unknown = sorted(settings.keys() - {_ON, _THREADS})
    if unknown:
        raise ValueError(f"the loader has no setting {unknown[0]!r}; it has {_ON} (true or false) and {_THREADS}")
    on, threads = settings.get(_ON, False), settings.get(_THREADS, _DEFAULT_THREADS)
    if not isinstance(on, bool):
        raise ValueError(f"{_ON} is {on!r}; it must be true or false")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _MOST_THREADS:
        raise ValueError(f"{_THREADS} is {threads!r}; it must be an integer from 1 to {_MOST_THREADS}")
    if not on and _THREADS in settings:
        raise ValueError(f"{_THREADS} has no effect while {_ON} is not true")
    return threads if on else 1


def _settings_are_known(context: ResolutionContext) -> str | None:
    try:
        _threads(context["model_loader_extra_config"])
    except (ValueError, AttributeError) as error:  # the latter if it is no object, which its declaration refuses
        return str(error)
    return None


def _from_a_hub(context: ResolutionContext) -> str | None:
    if context["download_dir"] is None or on_hub(context["model_path"]) is not None:
        return None
    return "nothing is downloaded: the model is not named by a hub id"


def _has_own_loader(argument: str, default: object) -> Constraint:
    """Random weights have no files, and those for layers of transformers are read in another way."""

    def check(context: ResolutionContext) -> str | None:
        if context[argument] == default or context.model is None:
            return None
        if context["load_format"] == "dummy":
            return "random weights are not read from files (load_format is dummy)"
        if context["custom_weight_loader"]:
            return "the weights are given by a loader, not read from files (custom_weight_loader)"
        return _loaded_by_transformers(context)

    reads = ("load_format", "model_impl", "custom_weight_loader")
    return Constraint(argument, "inert", check, "Leave it out.", reads=reads)


def _loaded_by_transformers(context: ResolutionContext) -> str | None:
    model = context.model
    if model is None:
        return None
    if context["model_impl"] == "transformers":
        return "weights for layers of transformers are read in another way (model_impl is transformers)"
    if isinstance(native_tree_of_model(model), str):
        return f"weights for layers of transformers, which {model.architecture} has here, are read in another way"
    return None


def _may_be_deleted(context: ResolutionContext) -> str | None:
    if not context["delete_ckpt_after_loading"] or context.model is None:
        return None
    if context["dp_size"] > 1:
        return f"each of {context['dp_size']} replicas (dp_size) reads the weights, at its own time"
    if context["load_format"] == "dummy":
        return "random weights have no files (load_format is dummy)"
    if context["custom_weight_loader"]:
        return "the weights are given by a loader, not read from files (custom_weight_loader)"
    if context.model.format == "gguf":
        return "the file also holds the tokenizer and the configuration of the model, which the server reads later"
    return None


def _loaders_are_installed(context: ResolutionContext) -> str | None:
    """Raises PluginError for one that is faulty."""
    names = context["custom_weight_loader"]
    installed = LOADERS.names() if names else ()
    for name in names:
        if name not in installed or LOADERS.find(name) is None:
            loaders = f"they have {', '.join(installed)}" if installed else "there is none"
            return f"no installed package has a weight loader {name!r}; {loaders}"
    return f"{names[0]} is named twice" if len(set(names)) < len(names) else None


def _loaders_refuse(context: ResolutionContext) -> str | None:
    names, model = context["custom_weight_loader"], context.model
    if model is None or not names or not set(names) <= set(LOADERS.names()):
        return None
    clauses = ((name, refusal(name, model)) for name in names)
    return next(
        (f"the weight loader {name} refuses {model.path}: {clause}" for name, clause in clauses if clause), None
    )


def _random(context: ResolutionContext) -> str | None:
    if not context["custom_weight_loader"] or context["load_format"] != "dummy":
        return None
    return "the weights are random (load_format is dummy)"


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "model_loader_extra_config",
        "bad_value",
        _settings_are_known,
        f'Pass an object such as {{"{_ON}": true, "{_THREADS}": 8}}.',
    ),
    Constraint(
        "delete_ckpt_after_loading",
        "excluded",
        _may_be_deleted,
        "Leave it out.",
        reads=("load_format", "custom_weight_loader", "dp_size"),
    ),
    Constraint(
        "custom_weight_loader",
        "bad_value",
        _loaders_are_installed,
        "Install the package, or use one of the names; docs/weight-loaders.md says how a package provides one.",
    ),
    Constraint("custom_weight_loader", "loader_unfit", _loaders_refuse, "Leave it out, or load another model."),
)

# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("download_dir", "inert", _from_a_hub, "Leave it out, or name the model by its hub id.", ("model_path",)),
    Constraint("custom_weight_loader", "inert", _random, "Leave one of the two out.", reads=("load_format",)),
    _has_own_loader("weight_loader_disable_mmap", False),
    _has_own_loader("model_loader_extra_config", "{}"),
)
