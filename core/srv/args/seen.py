"""What a statement is allowed to see, enforced: facts, and the arguments that it declared.

Calls into plugins' pure functions pass through `ask`, so that a failing one is reported by its owner's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from srv.errors import PluginError, SrvError
from srv.models.facts import ModelFacts
from srv.platform.facts import DeviceFacts

Answer = TypeVar("Answer")


class UndeclaredRead(PluginError):
    """A statement read an argument that it does not name in `reads`."""


class Facts(NamedTuple):
    """What is known before resolution: the device, what its platform can do, the model."""

    device: DeviceFacts | None
    model: ModelFacts | None
    capabilities: frozenset[str]


class View:
    """The `Seen` of one statement. `values` may hold more than `reads` names; it stays out of sight."""

    def __init__(
        self, owner: str, member: str, facts: Facts, reads: Collection[str], values: Mapping[str, Any]
    ) -> None:
        self._owner, self._member, self._facts = owner, member, facts
        self._reads, self._values = reads, MappingProxyType(values)  # nobody changes what others said

    @property
    def device(self) -> DeviceFacts:
        if self._facts.device is None:
            raise PluginError(
                self._owner, self._member, "it reads device facts where no device is known", "Report this as a bug."
            )
        return self._facts.device

    @property
    def model(self) -> ModelFacts | None:
        return self._facts.model

    @property
    def capabilities(self) -> frozenset[str]:
        return self._facts.capabilities

    def __getitem__(self, argument: str) -> Any:
        if argument not in self._reads:
            raise UndeclaredRead(
                self._owner,
                self._member,
                f"it reads {argument} without declaring it",
                f"It must name {argument} in `reads`.",
            )
        return self._values.get(argument)


def ask(owner: str, member: str, function: Callable[..., Answer], *given: Any) -> Answer:
    """Call a statement's function; anything but an error of ours becomes a PluginError naming the owner."""
    try:
        return function(*given)
    except SrvError:
        raise
    except Exception as error:
        raise PluginError(
            owner, member, f"it raised {type(error).__name__}: {error}", "Report this to its authors."
        ) from error
