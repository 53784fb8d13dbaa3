"""The frozen configuration: one attribute a group, and all declarations by name.

Nothing here resolves anything; a `Config` made by `srv.args.resolve` never changes afterwards. It travels
to the engine process as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from srv.args.groups.memory import MemoryArgs
from srv.args.groups.model import ModelArgs
from srv.args.groups.parallel import ParallelArgs
from srv.args.groups.platform import PlatformArgs
from srv.args.groups.schedule import ScheduleArgs
from srv.args.groups.server import ServerArgs
from srv.args.spec import Argument, read_groups
from srv.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every argument's value. `Config()` holds the declared defaults."""

    model: ModelArgs = field(default_factory=ModelArgs)
    platform: PlatformArgs = field(default_factory=PlatformArgs)
    memory: MemoryArgs = field(default_factory=MemoryArgs)
    schedule: ScheduleArgs = field(default_factory=ScheduleArgs)
    server: ServerArgs = field(default_factory=ServerArgs)
    parallel: ParallelArgs = field(default_factory=ParallelArgs)

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


GROUPS: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelArgs,
        "platform": PlatformArgs,
        "memory": MemoryArgs,
        "schedule": ScheduleArgs,
        "server": ServerArgs,
        "parallel": ParallelArgs,
    }
)
ARGUMENTS: Mapping[str, Argument] = read_groups(GROUPS)


def make_config(values: Mapping[str, Any]) -> Config:
    """A configuration of these values by argument name; what is not named keeps its declared default."""
    made: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        made[ARGUMENTS[name].group][name] = value
    return Config(**{item.name: GROUPS[item.name](**made[item.name]) for item in fields(Config)})


def find_argument(spelling: str) -> Argument | None:
    """The argument of a name, alias or flag ("page_size", "page-size", "--page-size")."""
    name = spelling.removeprefix("--").replace("-", "_")
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    return next((argument for argument in ARGUMENTS.values() if name in argument.names), None)


def all_names() -> tuple[str, ...]:
    """Every name and alias, with underscores: what a misspelt one is compared with."""
    return tuple(name for argument in ARGUMENTS.values() for name in argument.names)
