"""Whether the attention backends of a rank can compute all layers of its model; asked before weights are read.

`srv plan` and a launch have asked the backends' specs the same. Must not know pools or how backends are built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from srv.args.config import ARGUMENTS
from srv.errors import StartError
from srv.platform import registry
from srv.platform.contract import why_unsupported
from srv.platform.interface import AttentionBackend
from srv.platform.layers import LayerKind, layer_kinds, missing_traits, unsupported_layers
from srv.specs import AttentionLayer, ModelFacts


class LayerCheck:
    """The question for one model on one platform."""

    def __init__(self, platform: str, model: ModelFacts) -> None:
        self._platform, self._model = platform, model

    def require(
        self, layers: Sequence[AttentionLayer], argument: str, name: str, backends: Sequence[AttentionBackend]
    ) -> None:
        """Raise StartError unless the backend `name`, which `argument` chooses, can compute every layer.

        backends: the live one of each cache group. PluginError if one of them answers with anything but a reason or
        None.
        """
        kinds = layer_kinds(layers, self._model)
        found = unsupported_layers(kinds, lambda layer: why_unsupported(backends[layer.group], layer, name))
        if found:
            reason = f"attention backend {name} does not fit {self._model.name}: {'; '.join(found)}"
            raise StartError([f"{reason}. {self._remedy(kinds, argument, name)} [layers_unsupported]"], 2)

    def _remedy(self, kinds: Sequence[LayerKind], argument: str, name: str) -> str:
        others = [
            other
            for other, traits in self._offered().items()
            if other != name and not unsupported_layers(kinds, partial(missing_traits, traits))
        ]
        another = (
            f"Choose another backend with {ARGUMENTS[argument].flag} ({', '.join(others)}), or" if others else "Choose"
        )
        return f"{another} another platform with --device."

    def _offered(self) -> Mapping[str, tuple[str, ...]]:
        """The traits of each attention backend of the platform, by its name."""
        own = registry.find_platforms()[self._platform].loaded.facts.backends.get("attention", ())
        return {spec.name: spec.layer_traits for spec in (*registry.find_backends(self._platform, "attention"), *own)}
