"""The checks that platforms with memory of their own share: what they say, and their remedy if something is wrong."""

from __future__ import annotations

from srv.platform.diagnosis import device_checks, verdict
from srv.platform.facts import DeviceFacts
from srv.platform.interface import Check, Memory

GIB = 2**30
FACTS = DeviceFacts("mk1", 64 * GIB, 2, "Imagined One", versions={"driver": "1.2"})


def test_a_computation_is_right_or_wrong_with_a_remedy() -> None:
    assert verdict("compute", True, "a norm is", "Try again.") == Check("compute", True, "a norm is right", "")
    assert verdict("compute", False, "a norm is", "Try again.") == Check(
        "compute", False, "a norm is wrong", "Try again."
    )


def test_the_device_its_versions_and_its_memory_are_named() -> None:
    device, versions, memory = device_checks(FACTS, Memory(48 * GIB, 64 * GIB))
    assert device == Check("device", True, "2 x Imagined One, mk1")
    assert (versions.name, versions.ok) == ("versions", True)
    assert "driver 1.2" in versions.detail
    assert memory == Check("memory", True, "48.0 of 64.0 GiB free", "")


def test_a_device_without_free_memory_has_a_remedy_that_names_who_uses_it() -> None:
    *_, memory = device_checks(FACTS, Memory(0, 64 * GIB), "smi lists them")
    assert (memory.ok, memory.detail) == (False, "0.0 of 64.0 GiB free")
    assert "(smi lists them)" in memory.remedy
