"""The cards that can be simulated, as data. It imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Soc:
    """One card. `soc_id`: the result of `get_soc_version` on the real card. `memory` and `l2_cache` are bytes."""

    key: str
    name: str
    soc_id: int
    memory: int
    cube_cores: int
    vector_cores: int
    l2_cache: int

    @property
    def device_name(self) -> str:
        """The real card's name, marked as simulated."""
        return f"{self.name} (simulated)"


# Ids count up from 220 (910B1, B2, B2C, B3, B4, B4_1) and from 250 (910_9391, 9392, 9381, 9382, 9372, 9362).
SOCS = {
    soc.key: soc
    for soc in (
        Soc("a2", "Ascend910B3", 223, 64 * _GIB, 20, 40, 192 * _MIB),
        Soc("a2-32g", "Ascend910B4", 224, 32 * _GIB, 20, 40, 96 * _MIB),
        Soc("a3", "Ascend910_9391", 250, 64 * _GIB, 24, 48, 192 * _MIB),
    )
}


def find_soc(key: str) -> Soc:
    """The card with this key. Raises ValueError, with the known keys, for another."""
    if key not in SOCS:
        raise ValueError(f"the NPU simulator knows no card {key!r}; it simulates {', '.join(SOCS)}")
    return SOCS[key]
