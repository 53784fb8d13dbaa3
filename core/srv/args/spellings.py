"""Further names and words for arguments, read from `spellings.toml` beside this file: data, not behaviour.

Nothing here knows an argument's declaration; `srv.args.config` puts the two together.
"""

from __future__ import annotations

import tomllib
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
    table = tomllib.loads(Path(__file__).with_name("spellings.toml").read_text(encoding="utf-8"))
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
