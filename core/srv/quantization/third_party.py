"""Quantization methods of other distributions: entry points of the group `srv.quantization`. Torch-free.

Must not know the methods of `srv` itself. `srv.platform.extensions` checks what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.errors import ModelError, PluginError
from srv.platform.extensions import Extensions, contested
from srv.quantization.method import GROUP, QuantMethod, StoredCounts, StoredModel, UnknownStorage
from srv.quantization.schemes import LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

METHODS = Extensions(
    GROUP,
    QuantMethod,
    "quantization method",
    "docs/quantization.md",
    types={
        "name": str,
        "layers": (str, type(None)),
        "storage": (str, type(None)),
        "ops": tuple,
        "sharding": (str, type(None)),
        "online": bool,
        "dequantizable": bool,
    },
    functions=("detect",),
    targets=("layers", "storage"),
)


def find(name: str, *, taken: bool = False) -> QuantMethod | None:
    """The method of this name, whose functions name the distribution in their errors; or None.

    `taken`: `srv` has a method of this name, which none may replace. The ModelErrors of `detect` are passed on.
    """
    method = METHODS.find(name, taken=taken)
    return None if method is None else _guarded(name, method)


def _guarded(name: str, method: QuantMethod) -> QuantMethod:
    if method.layers is None and method.schemes is None:
        reason = "has neither layers nor schemes, of which layers are made"
        raise METHODS.error_in(METHODS.provider(name), f"{name}.layers", reason)
    form, schemes = method.of_form, method.schemes
    experts, at_load, row_block = method.experts, method.at_load, method.row_block

    def guarded_schemes(model: StoredModel) -> LayerSchemes:
        assert schemes is not None
        return partial(_scheme, name, METHODS.call(name, "schemes", schemes, model, expected=(ModelError,)))

    def of_form(model: ModelFacts) -> QuantMethod:
        assert form is not None
        created: object = METHODS.call(name, "of_form", form, model)
        if not isinstance(created, QuantMethod):
            reason = f"returned {type(created).__name__}, not a QuantMethod"
            raise METHODS.error_in(METHODS.provider(name), f"{name}.of_form", reason)
        return _guarded(name, created)

    return method._replace(
        detect=partial(METHODS.call, name, "detect", method.detect, expected=(ModelError,)),
        accepts=None if method.accepts is None else partial(METHODS.call, name, "accepts", method.accepts),
        schemes=None if schemes is None else guarded_schemes,
        experts=None if experts is None else partial(METHODS.call, name, "experts", experts),
        at_load=None if at_load is None else partial(METHODS.call, name, "at_load", at_load),
        row_block=None if row_block is None else partial(METHODS.call, name, "row_block", row_block),
        of_form=None if form is None else of_form,
        stored=None if method.stored is None else partial(_stored, name, method.stored),
    )


def _stored(
    name: str, stored: Callable[[Mapping[str, Any], str], StoredCounts], config: Mapping[str, Any], dtype: str
) -> StoredCounts:
    counts = METHODS.call(name, "stored", stored, config, dtype, expected=(UnknownStorage,))
    return partial(METHODS.call, name, "stored", counts, expected=(UnknownStorage,))


def _scheme(name: str, schemes: LayerSchemes, names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
    scheme: object = METHODS.call(name, "schemes", schemes, names, inputs, embedding, expected=(ModelError,))
    if scheme is None or isinstance(scheme, Scheme):
        return scheme
    reason = f"returned {scheme!r} for {names[0]}, neither a Scheme nor None"
    raise METHODS.error_in(METHODS.provider(name), f"{name}.schemes", reason)


def detect(quant_method: str, folder: Path, config: Mapping[str, Any]) -> str | None:
    """The name of the method that recognises a checkpoint, whose configuration states the method `quant_method`.

    A method of that name is the only one asked, and raises ModelError if it does not support the checkpoint. Otherwise
    all are asked; if none fits, the first fault is raised, because the faulty one may be the one that was needed.
    """
    names = METHODS.names()
    if quant_method in names:
        return _checked(quant_method, folder, config)
    matches: list[str] = []
    faults: list[PluginError] = []
    for name in names:
        try:
            if answer(name, folder, config) is True:
                matches.append(name)
        except PluginError as error:
            faults.append(error)
    if len(matches) > 1:
        owners = [METHODS.provider(name) for name in matches]
        raise contested(f"quantization methods {' and '.join(matches)}", owners, "the same checkpoint")
    if not matches and faults:
        raise faults[0]
    return matches[0] if matches else None


def _checked(name: str, folder: Path, config: Mapping[str, Any]) -> str:
    supported = answer(name, folder, config)
    if supported is True:
        return name
    owner = METHODS.provider(name)
    reason = f"its weights are quantized with {name}, in a form that the method of {owner} does not load"
    reason += f": {supported}" if supported else ""
    raise ModelError("unsupported_quantization", str(folder), reason, "Use the checkpoint in full precision")


def answer(name: str, folder: Path, config: Mapping[str, Any]) -> bool | str:
    """What the `detect` of a method says of a checkpoint."""
    method = find(name)
    return method is not None and method.detect(folder, config)
