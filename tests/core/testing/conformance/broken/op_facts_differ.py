"""The facts say that an op is computed by another implementation than the platform has.

Caught by op.coverage at L2, naming "rotary in float32: PlatformFacts.ops chooses fused, and Platform.ops reference".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import manifest

from srv_toy_device.facts import FACTS

OPS = tuple(replace(spec, name="fused") if spec.op == "rotary" else spec for spec in FACTS.ops)  # the fault

MANIFEST = manifest("op_facts_differ", facts={"ops": OPS})
