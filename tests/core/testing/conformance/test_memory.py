"""What the kit accepts as the memory of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from srv.platform.interface import Memory
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import memory


def checked(answer: object, probed: int = 100) -> str:
    kit: Any = SimpleNamespace(
        platform=SimpleNamespace(memory=lambda device: answer),
        device=None,
        device_facts=SimpleNamespace(memory_bytes=probed),
    )
    return memory(kit)


@pytest.mark.parametrize("free", [0, 1, 100])
def test_a_device_may_be_full_or_empty(free: int) -> None:
    assert checked(Memory(free, 100)) == f"{free} of 100 bytes are free"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "a NoneType, not a Memory"),
        (Memory(-1, 100), "free=-1 and total=100"),
        (Memory(101, 100), "free=101 and total=100"),
        (Memory(0, 0), "free=0 and total=0"),
        (Memory(1, 1.5), "free=1 and total=1.5"),
        (Memory(1, 70), "70 bytes in total, but the probe reported 100"),
    ],
)
def test_a_wrong_answer_is_named(answer: object, reason: str) -> None:
    with pytest.raises(Fault, match=reason):
        checked(answer)
