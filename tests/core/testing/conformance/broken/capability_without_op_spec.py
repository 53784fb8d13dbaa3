"""The facts declare 8-bit weights, but do not list one of their ops.

Caught by plan.ops at L0, naming "the capability w8a8 needs linear_w8a8_static".
"""

from __future__ import annotations

from toy_variant import manifest

from srv_toy_device.facts import FACTS

OPS = tuple(spec for spec in FACTS.ops if spec.op != "linear_w8a8_static")  # the fault

MANIFEST = manifest("capability_without_op_spec", facts={"ops": OPS})
