"""The facts say that an op is not computed in bfloat16, in which the platform computes it.

Caught by op.coverage at L2, naming "rotary in bfloat16: PlatformFacts.ops chooses nothing".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import manifest

from srv.platform.facts import DeviceFacts, OpCall
from srv_toy_device.facts import FACTS


def refuse(device: DeviceFacts, call: OpCall) -> str | None:
    return "bfloat16 has no kernel" if call.dtype == "bfloat16" else None


OPS = tuple(replace(spec, check=refuse) if spec.op == "rotary" else spec for spec in FACTS.ops)  # the fault

MANIFEST = manifest("op_facts_differ", facts={"ops": OPS})
