"""Stands where the NVIDIA CUDA platform's device code will be: says, in words, that it is not there yet.

The facts of the manifest are true without it (`srv plan` answers from them); what would compute refuses
before a weight is read.
"""

from __future__ import annotations

from typing import NoReturn

from srv.errors import PlatformUnavailable

CODE = "not_implemented"
REASON = "this version of srv describes NVIDIA CUDA devices but cannot compute on them yet"
REMEDY = "Use `srv plan --device cuda:PROFILE` to check flags for such a machine, or serve on another platform"


def create(context: object) -> NoReturn:
    """The manifest's `create`, and the target of its backends."""
    raise PlatformUnavailable("cuda", REASON, REMEDY, CODE)
