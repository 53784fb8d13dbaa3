"""What `srv doctor` and its child process hand one another: a request, and findings. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from srv.platform.facts import DeviceFacts

Status = Literal["ok", "warning", "error"]

STAGES = ("start", "memory", "computation", "diagnosis")
"""Of an examination, in their order."""


class Finding(msgspec.Struct, frozen=True):
    """What was looked at, how it is, what was seen, and what to do (empty where all is well).

    "error": a server cannot start because of it. "warning": it can, but something is not as it should be.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


class Request(msgspec.Struct, frozen=True):
    """What the child is told. `path` is its parent's import path, `options` what the manifest asked for."""

    name: str
    device: DeviceFacts
    options: dict[str, str | int | float | bool | None]
    path: tuple[str, ...]


class Line(msgspec.Struct, frozen=True):
    """One line of the child's answer: a stage begins, or (with a finding) something of it is known."""

    stage: str
    finding: Finding | None = None
