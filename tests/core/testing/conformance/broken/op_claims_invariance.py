"""An op is declared batch invariant, but rounds differently for several rows.

Caught by op.batch_invariant at L2, naming "rms_norm (reference)".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from torch import Tensor

    from srv.platform.interface import OpImpl
    from srv_toy_device.platform import ToyPlatform


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from srv_kernels import reference

    out = reference.rms_norm(x, weight, eps)
    return out if len(x) == 1 else (out.float() * (1 + 2.0**-22)).to(x.dtype)  # the fault


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Claiming(toy):  # type: ignore[valid-type, misc]
        @property
        def ops(self) -> tuple[OpImpl, ...]:
            return tuple(
                dataclasses.replace(impl, target=rms_norm, batch_invariant=True) if impl.op == "rms_norm" else impl
                for impl in super().ops
            )

    return Claiming


OPS = tuple(dataclasses.replace(spec, batch_invariant=spec.op == "rms_norm") for spec in FACTS.ops)
MANIFEST = manifest("op_claims_invariance", platform=platform, facts={"ops": OPS})
