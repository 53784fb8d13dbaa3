"""The spec of the attention backend has a trait that no layer can have.

Caught by manifest.members at L0, naming "names ['softcap']".
"""

from __future__ import annotations

import dataclasses

from toy_variant import backends, manifest

ATTENTION = tuple(dataclasses.replace(spec, traits=("softcap",)) for spec in backends()["attention"])  # the fault
MANIFEST = manifest("unknown_trait", facts={"backends": {**backends(), "attention": ATTENTION}})
