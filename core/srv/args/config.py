"""The frozen configuration: one attribute a group, and all declarations by name.

Nothing here resolves anything; a `Config` made by `srv.args.resolve` never changes afterwards. It travels
to the engine process as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

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
from srv.errors import InternalError


class Config(NamedTuple):
    """Every argument's value. `Config()` holds the declared defaults."""

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

    def get(self, name: str) -> Any:
        """The value of an argument by its name; KeyError if there is none of that name."""
        return getattr(getattr(self, ARGUMENTS[name].group), name)

    def to_json(self) -> str:
        """All values, flat, by name. Secret ones too: this is for the engine process, not for printing."""
        return json.dumps({name: argument.kind.dump(self.get(name)) for name, argument in ARGUMENTS.items()})

    @staticmethod
    def from_json(text: str) -> Config:
        """What `to_json` wrote; InternalError if it is anything else."""
        try:
            raw = json.loads(text)
            values = {name: ARGUMENTS[name].kind.read(value) for name, value in raw.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise InternalError(f"this is no configuration of this version of srv: {error!r}") from error
        if missing := ARGUMENTS.keys() - values.keys():
            raise InternalError(f"the configuration lacks {', '.join(sorted(missing))}")
        return make_config(values)


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


def _read(spellings: Spellings) -> Mapping[str, Argument]:
    found = dict(read_groups(GROUPS, spellings.names, spellings.old_names))
    for name, words in spellings.synonyms.items():
        arg = replace(found[name].arg, synonyms=(*found[name].arg.synonyms, *words))
        found[name] = replace(found[name], arg=arg)
    return MappingProxyType(found)


def _switch(name: str, said: Replacement) -> Argument:
    """A deprecated switch as an argument: it has flag, variable and key, and no place in a configuration."""
    arg = Arg(f"Old way to say {said}.")
    group = ARGUMENTS[said.argument].group
    return Argument(name, group, Kind(bool), False, arg, deprecated=f"say {said} instead", replaced_by=said)


SPELLINGS = read_spellings()
ARGUMENTS: Mapping[str, Argument] = _read(SPELLINGS)
# Switches that a user may still say and a configuration no longer holds; `srv.args.deprecated` translates them.
DEPRECATED: Mapping[str, Argument] = MappingProxyType(
    {name: _switch(name, said) for name, said in SPELLINGS.switches.items()}
)
_BY_NAME: Mapping[str, Argument] = MappingProxyType(
    {name: argument for argument in ARGUMENTS.values() for name in argument.names}
)


def make_config(values: Mapping[str, Any]) -> Config:
    """A configuration of these values by argument name; what is not named keeps its declared default."""
    made: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        made[ARGUMENTS[name].group][name] = value
    defaults = Config()
    return defaults._replace(**{group: getattr(defaults, group)._replace(**said) for group, said in made.items()})


def find_argument(spelling: str) -> Argument | None:
    """The argument of a name, alias or flag ("page_size", "page-size", "--page-size"); none of `DEPRECATED`."""
    return _BY_NAME.get(plain_name(spelling))


def find_any(spelling: str) -> Argument | None:
    """As `find_argument`, and of a deprecated switch too."""
    return find_argument(spelling) or DEPRECATED.get(plain_name(spelling))


def plain_name(spelling: str) -> str:
    """A name as declarations write it: "page_size" for "--page-size"."""
    return spelling.removeprefix("--").replace("-", "_")


def all_names() -> tuple[str, ...]:
    """Every name and alias, with underscores: what a misspelt one is compared with."""
    return (*_BY_NAME, *DEPRECATED)
