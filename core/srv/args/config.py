"""The frozen configuration: one attribute per group of arguments, and all declarations by name.

This module must not resolve anything. A `Config` is made by `srv.args.resolve`, never changes afterwards, and is sent
to the engine process within its `srv.executor.spec.EngineSpec`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.args.extra import extra_arguments
from srv.args.groups.cache import CacheArgs
from srv.args.groups.debug import DebugArgs
from srv.args.groups.disaggregation import DisaggregationArgs
from srv.args.groups.experts import ExpertsArgs
from srv.args.groups.graphs import GraphsArgs
from srv.args.groups.lora import LoraArgs
from srv.args.groups.memory import MemoryArgs
from srv.args.groups.model import ModelArgs
from srv.args.groups.observe import ObserveArgs
from srv.args.groups.parallel import ParallelArgs
from srv.args.groups.platform import PlatformArgs
from srv.args.groups.schedule import ScheduleArgs
from srv.args.groups.server import ServerArgs
from srv.args.groups.speculative import SpeculativeArgs
from srv.args.groups.weights import WeightsArgs
from srv.args.kinds import Kind
from srv.args.spec import Arg, Argument, Replacement, read_groups
from srv.args.spellings import Spellings, read_spellings


class Config(NamedTuple):
    """The values of all arguments, by group. `Config()` holds the declared defaults.

    `extras`: those of plugins by name, as JSON values; `srv.args.extra.arguments_of` gives them to their plugin.
    """

    model: ModelArgs = ModelArgs()
    weights: WeightsArgs = WeightsArgs()
    platform: PlatformArgs = PlatformArgs()
    memory: MemoryArgs = MemoryArgs()
    cache: CacheArgs = CacheArgs()
    schedule: ScheduleArgs = ScheduleArgs()
    server: ServerArgs = ServerArgs()
    observe: ObserveArgs = ObserveArgs()
    parallel: ParallelArgs = ParallelArgs()
    experts: ExpertsArgs = ExpertsArgs()
    speculative: SpeculativeArgs = SpeculativeArgs()
    lora: LoraArgs = LoraArgs()
    graphs: GraphsArgs = GraphsArgs()
    disaggregation: DisaggregationArgs = DisaggregationArgs()
    debug: DebugArgs = DebugArgs()
    extras: Mapping[str, Any] = MappingProxyType({})

    def get(self, name: str) -> Any:
        """The value of an argument of core by its name; KeyError if there is no such argument."""
        return getattr(getattr(self, ARGUMENTS[name].group), name)


GROUPS: Mapping[str, type[NamedTuple]] = MappingProxyType(
    {
        "model": ModelArgs,
        "weights": WeightsArgs,
        "platform": PlatformArgs,
        "memory": MemoryArgs,
        "cache": CacheArgs,
        "schedule": ScheduleArgs,
        "server": ServerArgs,
        "observe": ObserveArgs,
        "parallel": ParallelArgs,
        "experts": ExpertsArgs,
        "speculative": SpeculativeArgs,
        "lora": LoraArgs,
        "graphs": GraphsArgs,
        "disaggregation": DisaggregationArgs,
        "debug": DebugArgs,
    }
)


def _read_arguments(spellings: Spellings) -> Mapping[str, Argument]:
    arguments = dict(read_groups(GROUPS, spellings.names, spellings.old_names))
    for name, synonyms in spellings.synonyms.items():
        arg = replace(arguments[name].arg, synonyms=(*arguments[name].arg.synonyms, *synonyms))
        arguments[name] = replace(arguments[name], arg=arg)
    return MappingProxyType(arguments)


def _deprecated_switch(name: str, replacement: Replacement) -> Argument:
    """A deprecated switch as an argument: it has a flag, a variable and a key, but no field in a configuration."""
    arg = Arg(f"Former switch for {replacement}.")
    group = ARGUMENTS[replacement.argument].group
    deprecated = f"use {replacement} instead"
    return Argument(name, group, Kind(bool), False, arg, deprecated=deprecated, replaced_by=replacement)


SPELLINGS = read_spellings()
ARGUMENTS: Mapping[str, Argument] = _read_arguments(SPELLINGS)
# Switches that still work but are not part of a configuration; `srv.args.deprecated` translates them.
DEPRECATED: Mapping[str, Argument] = MappingProxyType(
    {name: _deprecated_switch(name, replacement) for name, replacement in SPELLINGS.switches.items()}
)
_BY_NAME: Mapping[str, Argument] = MappingProxyType(
    {name: argument for argument in ARGUMENTS.values() for name in argument.names}
)


def make_config(values: Mapping[str, Any], extras: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """A configuration with these values by argument name; all other arguments keep their declared defaults.

    `extras`: values of plugins' arguments as JSON values.
    """
    by_group: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        by_group[ARGUMENTS[name].group][name] = value
    defaults = Config()
    groups = {group: getattr(defaults, group)._replace(**new) for group, new in by_group.items()}
    return defaults._replace(**groups, extras=MappingProxyType(dict(extras)))


def plugin_arguments() -> Mapping[str, Argument]:
    """The arguments that installed plugins declare, by name. PluginError if one cannot be used."""
    return extra_arguments(all_core_names())


def all_arguments() -> Mapping[str, Argument]:
    """The arguments of core, then those of plugins."""
    extra = plugin_arguments()
    return MappingProxyType({**ARGUMENTS, **extra}) if extra else ARGUMENTS


def argument_named(name: str) -> Argument:
    """The argument of core or of a plugin that has this declared name; KeyError if there is none."""
    return ARGUMENTS.get(name) or plugin_arguments()[name]


def find_any_argument(spelling: str) -> Argument | None:
    """Like `find_argument_or_deprecated`, but also find arguments of plugins."""
    name = normalize_name(spelling)
    return find_argument_or_deprecated(name) or next(
        (plugin_argument for plugin_argument in plugin_arguments().values() if name in plugin_argument.names), None
    )


def find_argument(spelling: str) -> Argument | None:
    """Find an argument by name, alias or flag ("page_size", "page-size", "--page-size"), but not in `DEPRECATED`."""
    return _BY_NAME.get(normalize_name(spelling))


def find_argument_or_deprecated(spelling: str) -> Argument | None:
    """Like `find_argument`, but also find deprecated switches."""
    return find_argument(spelling) or DEPRECATED.get(normalize_name(spelling))


def normalize_name(spelling: str) -> str:
    """Convert a flag or name to the form of declared names: "--page-size" to "page_size"."""
    return spelling.removeprefix("--").replace("-", "_")


def all_names() -> tuple[str, ...]:
    """All names and aliases, with underscores; used to suggest a name for a misspelt one."""
    return (
        *_BY_NAME,
        *DEPRECATED,
        *(name for plugin_argument in plugin_arguments().values() for name in plugin_argument.names),
    )


@functools.cache
def all_core_names() -> frozenset[str]:
    """All names and aliases in core, with underscores."""
    return frozenset((*_BY_NAME, *DEPRECATED))
