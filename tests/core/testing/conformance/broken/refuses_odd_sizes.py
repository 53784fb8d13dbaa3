"""A plugin without a fault, as a control: its products take multiples of 32 only, as its facts say."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from toy_variant import manifest

from srv.platform.facts import DeviceFacts, OpCall
from srv_toy_device.facts import FACTS, check_op

if TYPE_CHECKING:
    from torch import Tensor

    from srv.platform.interface import OpImpl
    from srv_toy_device.platform import ToyPlatform

_UNIT = 32


def check(device: DeviceFacts, call: OpCall) -> str | None:
    odd = [name for name, size in call.sizes.items() if size % _UNIT]
    return f"{' and '.join(odd)} must be multiples of {_UNIT}" if odd else check_op(device, call)


def linear_w8a8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    from srv_kernels import reference

    assert x.shape[1] % _UNIT == len(weight) % _UNIT == 0, f"a call of {x.shape[1]} inputs and {len(weight)} outputs"
    return reference.linear_w8a8(x, weight, weight_scale, bias)


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    from srv.platform.ops import implementations

    class OfWholeBlocks(toy):  # type: ignore[valid-type, misc]
        @property
        def ops(self) -> tuple[OpImpl, ...]:
            (device,) = FACTS.profiles.values()
            return implementations(OPS, device, {("linear_w8a8", "reference"): linear_w8a8})

    return OfWholeBlocks


OPS = tuple(dataclasses.replace(spec, check=check) if spec.op == "linear_w8a8" else spec for spec in FACTS.ops)
MANIFEST = manifest("refuses_odd_sizes", platform=platform, facts={"ops": OPS})
