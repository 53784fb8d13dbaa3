"""The ResolutionContext passed to one function of a Default, Constraint, Contribution or BackendSpec.

It gives facts, and only the arguments that are declared in `reads`. All calls of plugins' pure functions go through
`call_plugin`, so that an exception is reported with its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from srv.errors import PluginError, SrvError
from srv.platform.facts import DeviceFacts
from srv.specs import ModelFacts

Result = TypeVar("Result")


class UndeclaredRead(PluginError):
    """A plugin's function read an argument that is not declared in `reads`."""


class Facts(NamedTuple):
    """Facts that are known before resolution: the device, its platform's capabilities, the model."""

    device: DeviceFacts | None
    model: ModelFacts | None
    capabilities: frozenset[str]


class DeclaredReadsContext:
    """A `ResolutionContext`. `values` may hold more arguments than `reads`; only those in `reads` can be read.

    `owner` and `member` name the function in errors.
    """

    def __init__(
        self, owner: str, member: str, facts: Facts, reads: Collection[str], values: Mapping[str, Any]
    ) -> None:
        self._owner, self._member, self._facts = owner, member, facts
        self._reads, self._values = reads, MappingProxyType(values)  # the function must not change values

    @property
    def device(self) -> DeviceFacts:
        if self._facts.device is None:
            raise PluginError(
                self._owner, self._member, "it reads device facts, but no device is known", "Report this as a bug."
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


def call_plugin(owner: str, member: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a plugin's pure function; an exception that is not a SrvError becomes a PluginError that names the owner."""
    try:
        return function(*arguments)
    except SrvError:
        raise
    except Exception as error:
        raise PluginError(
            owner, member, f"it raised {type(error).__name__}: {error}", "Report this to its authors."
        ) from error
