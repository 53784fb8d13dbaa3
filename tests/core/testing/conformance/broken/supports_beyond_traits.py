"""The backend supports layers with a sliding window, but its spec lacks the trait, so that no such model reaches it.

Caught by backends.layers at L1, naming "supports a layer with a sliding window of 1 tokens".
"""

from __future__ import annotations

import dataclasses

from toy_variant import backends, manifest

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=("soft_cap",) if family == "attention" else ()) for spec in specs)
    for family, specs in backends().items()
}
MANIFEST = manifest("supports_beyond_traits", facts={"backends": SPECS})  # the fault
