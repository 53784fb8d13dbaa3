"""The backend of experts claims that captured steps can run it, but it reads the experts of the captured step.

Caught by engine.experts at L3, naming "captur".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import backends, manifest

_OWN = backends()
_CAPTURED = {**_OWN, "moe": tuple(replace(spec, graphs=True) for spec in _OWN["moe"])}  # the fault
MANIFEST = manifest("experts_claim_graphs", facts={"backends": _CAPTURED})
