"""The platform lacks a method of the contract.

Caught by platform.starts at L1, naming "staging".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    members = {**vars(toy.__base__), **vars(toy)}
    for member in ("staging", "__dict__", "__weakref__"):  # the fault; the others belong to a class itself
        members.pop(member)
    return type("Incomplete", (), members)


MANIFEST = manifest("missing_member", platform=platform)
