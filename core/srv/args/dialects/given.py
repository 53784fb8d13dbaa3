"""What a conversion gets and what it answers with; both are plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from srv.args.dialects.table import Row

DeviceMemory: TypeAlias = Callable[[], int | None]


def no_device() -> int | None:
    """The memory of a device that nobody named."""
    return None


@dataclass(frozen=True, slots=True)
class Given:
    """What a conversion may look at: the flag, its text, its row, the other flags' texts by name, and the device."""

    flag: str
    text: str
    row: Row
    others: Mapping[str, str] = field(default_factory=dict)
    device_memory: DeviceMemory = no_device

    def other(self, flag: str, default: str = "") -> str:
        """What another flag of the command line says."""
        return self.others.get(flag, default)


@dataclass(frozen=True, slots=True)
class Converted:
    """Texts by argument, as a command line would give them. None at all: `srv` does so without being told."""

    settings: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why this value cannot be said with arguments of `srv`, and what to do."""

    code: str
    reason: str
    remedy: str


Outcome: TypeAlias = Converted | Unfit
Conversion: TypeAlias = Callable[[Given], Outcome]


def to(given: Given, text: str, note: str = "") -> Converted:
    """The row's argument takes the text."""
    return Converted({given.row.to: text}, note)


def no_number(given: Given, wants: str) -> Unfit:
    """The text is not what the flag takes."""
    return Unfit("bad_value", f"it is not {wants}", f"Give {wants}, as {given.flag} takes it.")
