"""Further names and words for arguments, read from `spellings.json` beside this file: data, not behaviour.

A declaration in core may not name a device or its maker, but the command lines that people have may: so the words stand
there, as data. Nothing in core compares anything with them; they are only ways to reach an argument. Nothing here knows
an argument's declaration either; `srv.args.config` puts the two together.

    spellings   the same argument under a name that a declaration may not have; no note is given when one is used
    old_names   names that an argument had before; they work, and a note gives today's
    switches    deprecated ones that another argument has taken over; they work, and a note gives what to say instead
    synonyms    other words for a value
    published   names of backends that other engines publish for an argument whose choices the installed platforms
                give: srv accepts what is installed, not what is listed; lists help completion and the support matrix
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
    """The table: by argument, except `switches`, which is by the switch's own name.

    names: further names. old_names: former names. switches: what a deprecated switch stands for. synonyms:
    (word, value) pairs. published: names of backends that other engines publish for it.
    """

    names: Mapping[str, tuple[str, ...]]
    old_names: Mapping[str, tuple[str, ...]]
    switches: Mapping[str, Replacement]
    synonyms: Mapping[str, tuple[tuple[str, str], ...]]
    published: Mapping[str, tuple[str, ...]]


def read_spellings() -> Spellings:
    """The table that comes with `srv`."""
    table = json.loads(Path(__file__).with_name("spellings.json").read_text(encoding="utf-8"))
    return Spellings(
        _turned(table["spellings"]),
        _turned(table["old_names"]),
        MappingProxyType({name: Replacement(**said) for name, said in table["switches"].items()}),
        MappingProxyType({name: tuple(words.items()) for name, words in table["synonyms"].items()}),
        MappingProxyType({name: tuple(values) for name, values in table["published"].items()}),
    )


def _turned(names: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """From "further name -> argument" to "argument -> further names"."""
    turned: dict[str, tuple[str, ...]] = {}
    for name, argument in names.items():
        turned[argument] = (*turned.get(argument, ()), name)
    return MappingProxyType(turned)
