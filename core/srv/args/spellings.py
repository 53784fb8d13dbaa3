"""Further names of arguments and values, read from the data file `spellings.json` next to this module.

A declaration in core must not name a device or its vendor, but existing command lines do. So these names are data, and
core code must not compare anything with them: they are only aliases of an argument. This module must not know the
declarations; `srv.args.config` combines both.

    spellings   aliases that name a device or a vendor; using them logs no note
    old_names   former names; they still work, and a note names the current one
    switches    deprecated switches, replaced by another argument; they still work, and a note names the replacement
    synonyms    synonyms of a value
    published   names of backends that other engines document for an argument whose choices depend on the installed
                platforms; srv accepts the installed backends, and uses this list for completion and the support matrix
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from srv.args.spec import Replacement


@dataclass(frozen=True, slots=True)
class Spellings:
    """The data file, keyed by argument, except `switches`, which is keyed by the name of the switch.

    names: aliases. old_names: former names. switches: replacements of deprecated switches. synonyms: pairs
    (synonym, value). published: names of backends that other engines document for the argument.
    """

    names: Mapping[str, tuple[str, ...]]
    old_names: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, Replacement]
    synonyms: Mapping[str, tuple[tuple[str, str], ...]]
    published: Mapping[str, tuple[str, ...]]


def read_spellings() -> Spellings:
    """Read the data file that is installed with `srv`."""
    table = json.loads(Path(__file__).with_name("spellings.json").read_text(encoding="utf-8"))
    return Spellings(
        _invert(table["spellings"]),
        _invert(table["old_names"]),
        MappingProxyType({name: Replacement(**fields) for name, fields in table["switches"].items()}),
        MappingProxyType({name: tuple(synonyms.items()) for name, synonyms in table["synonyms"].items()}),
        MappingProxyType({name: tuple(values) for name, values in table["published"].items()}),
    )


def _invert(names: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Invert the mapping "alias -> argument" to "argument -> aliases"."""
    aliases: dict[str, tuple[str, ...]] = {}
    for name, argument in names.items():
        aliases[argument] = (*aliases.get(argument, ()), name)
    return MappingProxyType(aliases)
