"""The fields of a configuration, with the defaults and the alternative names of the field's library, transformers.

`defaults.json` holds them per model type, for the fields that families read. It is generated from transformers' classes
and compared with them by a test, so that srv needs neither at run time. This module knows no family but by the names
that its fields had before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from srv.models.sizes.parts import UnknownSizes

DEFAULTS_FILE = Path(__file__).with_name("defaults.json")

# Names that fields had before, by model type; transformers reads them as well.
FORMER_NAMES: Mapping[str, Mapping[str, str]] = {
    "bloom": {"n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size"},
    "lfm2": {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "nemotron_h": {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
}


@cache
def known_defaults() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """By model type: "defaults" (the value of a field that is left out) and "names" (other names of a field)."""
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(DEFAULTS_FILE.read_text(encoding="utf-8"))
    return known


class Fields:
    """The fields of a configuration, as attributes. Reading one that has neither value nor default is UnknownSizes.

    `model_type`: whose defaults and names apply. `dtype_name`: of the model's activations.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str, dtype_name: str) -> None:
        former = FORMER_NAMES.get(model_type, {})
        renamed = {new: values[old] for old, new in former.items() if old in values}
        self._values, self.dtype_name = {**values, **renamed}, dtype_name
        own = known_defaults().get(model_type, {})
        self._defaults, self._names = own.get("defaults", {}), own.get("names", {})

    def __getattr__(self, name: str) -> Any:
        found = self.get(name, ...)
        if found is ...:
            raise UnknownSizes(f"config.json lacks {name}")
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, else transformers' default, else `default`."""
        own = self._names.get(name, name)
        names = list(dict.fromkeys([own, name, *(alias for alias, meant in self._names.items() if meant == own)]))
        for source in (self._values, self._defaults):
            for each in names:
                if each in source:
                    return source[each]
        return default

    def part(self, name: str, model_type: str) -> Fields:
        """The nested configuration `name`, of another model type; the fields themselves if it is not nested."""
        nested = self._values.get(name)
        values = nested if isinstance(nested, Mapping) else self._values
        return Fields(values, model_type, self.dtype_name)
