"""The input and the result of a conversion; both are plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from srv.args.dialects.table import DialectRow

DeviceMemory: TypeAlias = Callable[[], int | None]


def no_device() -> int | None:
    """The device memory if no device is known."""
    return None


@dataclass(frozen=True, slots=True)
class ConversionInput:
    """A flag, its text and its row; `others`: the texts of the other flags by name; `device_memory`: in bytes."""

    flag: str
    text: str
    row: DialectRow
    others: Mapping[str, str] = field(default_factory=dict)
    device_memory: DeviceMemory = no_device

    def other(self, flag: str, default: str = "") -> str:
        """The text of another flag of the command line, or `default` if it is not given."""
        return self.others.get(flag, default)


@dataclass(frozen=True, slots=True)
class Converted:
    """Texts by argument, as on a command line. Empty if `srv` needs no setting for it."""

    settings: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Untranslatable:
    """The reason why no arguments of `srv` express this value, and a remedy."""

    code: str
    reason: str
    remedy: str


Outcome: TypeAlias = Converted | Untranslatable
Conversion: TypeAlias = Callable[[ConversionInput], Outcome]


def set_argument(setting: ConversionInput, text: str, note: str = "") -> Converted:
    """Set the row's argument to the text."""
    return Converted({setting.row.to: text}, note)


def wrong_type(setting: ConversionInput, expected: str) -> Untranslatable:
    """The text has the wrong type; `expected` is the right one, with its article."""
    return Untranslatable("bad_value", f"it is not {expected}", f"Set {setting.flag} to {expected}.")
