"""The facts say that attention takes the lengths on the device, and it takes those of the host, which are bounds.

Caught by attention.device_lengths at L2, naming "lengths only the device knows".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import backends, manifest

_OWN = backends()
_ATTENTION = tuple(replace(spec, lengths="device") for spec in _OWN["attention"])  # the fault

MANIFEST = manifest("attention_ignores_device_lengths", facts={"backends": {**_OWN, "attention": _ATTENTION}})
