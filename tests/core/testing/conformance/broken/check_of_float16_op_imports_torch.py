"""The check of an op imports torch for float16.

Caught by manifest.call_purity at L0, naming "in float16 at 64 imports torch".
"""

from __future__ import annotations

import dataclasses

from toy_variant import manifest

from srv.platform.facts import DeviceFacts, OpCall
from srv_toy_device.facts import FACTS, check_op


def check(device: DeviceFacts, call: OpCall) -> str | None:
    if call.dtype == "float16":
        import torch  # the fault

        if torch.get_num_threads() == 0:
            return "it needs threads"
    return check_op(device, call)


OPS = tuple(dataclasses.replace(spec, check=check) if spec.op == "rotary" else spec for spec in FACTS.ops)
MANIFEST = manifest("check_of_float16_op_imports_torch", facts={"ops": OPS})
