"""The messages between `srv doctor` and its child process: a request, and findings. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from srv.platform.facts import DeviceFacts

Status = Literal["ok", "warning", "error"]

STAGES = ("start", "memory", "computation", "diagnosis", "sensors")
"""The stages of an examination, in order."""

NOT_NEEDED = ("diagnosis", "sensors")
"""The stages whose failure does not prevent a server from starting."""


class Finding(msgspec.Struct, frozen=True):
    """One result of an examination: what was checked, its status, details, and a remedy (empty if the status is "ok").

    "error": a server cannot start because of it. "warning": a server can start, but something should be fixed.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


class FindingRequest(msgspec.Struct, frozen=True):
    """The child's input. `path`: its parent's `sys.path`. `options`: values of the arguments in `Manifest.options`."""

    name: str
    device: DeviceFacts
    options: dict[str, str | int | float | bool | None]
    path: tuple[str, ...]


class FindingLine(msgspec.Struct, frozen=True):
    """One line of the child's output: the start of a stage or, with `finding`, one of its results."""

    stage: str
    finding: Finding | None = None
