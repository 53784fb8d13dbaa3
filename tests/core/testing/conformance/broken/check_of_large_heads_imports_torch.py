"""The check of the attention backend imports torch for heads of more than 128, to ask which kernels there are.

Caught by manifest.call_purity at L0, naming "a small float32 model with heads of 256 imports torch".
"""

from __future__ import annotations

import dataclasses

from toy_variant import backends, manifest

from srv.platform.facts import Requires, ResolutionContext, Unfit
from srv_toy_device.facts import check_attention


def check(context: ResolutionContext) -> Requires | Unfit:
    if context.model is not None and context.model.head_dim > 128:
        import torch  # the fault

        if torch.get_num_threads() == 0:
            return Unfit(("large heads need threads",))
    return check_attention(context)


FAMILIES = backends()
ATTENTION = tuple(dataclasses.replace(spec, check=check) for spec in FAMILIES["attention"])
MANIFEST = manifest("check_of_large_heads_imports_torch", facts={"backends": {**FAMILIES, "attention": ATTENTION}})
