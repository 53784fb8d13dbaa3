"""MiMo-7B: Qwen2 with heads of a size of its own. Published with its code; transformers has no class.

The layers that predict further tokens (`model.mtp_layers`) are not loaded, which launches and plans say.
"""

from __future__ import annotations

from srv.models.families.architecture import Architecture
from srv.models.families.qwen2 import QWEN_DEFAULTS, tree

ARCHITECTURE = Architecture(
    name="MiMoForCausalLM",
    tree=tree,
    defaults=QWEN_DEFAULTS,
)
