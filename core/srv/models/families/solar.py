"""Solar Pro: Llama in which some layers read a weighted sum of the residual and of that before an earlier layer.

Published with its code; transformers has no class. All layers have the window that the configuration states, as in
vLLM, which reads it for every class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from srv.models.blueprint import Part, SkipConnection
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, one_window
from srv.models.families.llama import LLAMA_DEFAULTS
from srv.models.unsupported import UnsupportedConfig

# The layers before which a residual is kept, and those that read it: two fields for each of two residuals.
SKIPS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["attention_bias"])
    attention = parts.attention(sizes, bias=bias, window=one_window(config))
    layers = parts.pre_norm_layers(sizes, attention, parts.mlp(sizes, bool(config["mlp_bias"])))
    return parts.decoder(sizes, layers, skips=tuple(_skips(config, sizes.layers)))


def _skips(config: Mapping[str, Any], layers: int) -> Iterator[SkipConnection]:
    """A layer reads the residual that was kept last. `bskcn_tv`: its shares in training and in inference."""
    share = float(config["bskcn_tv"][1])
    for kept, read in SKIPS:
        for target in (each for each in config[read] if each < layers):
            sources = [each for each in config[kept] if each <= target]
            if not sources:
                raise UnsupportedConfig(f"{kept} = {config[kept]} has none for layer {target} of {read}")
            yield SkipConnection(max(sources), target, share)


ARCHITECTURE = Architecture(
    name="SolarForCausalLM",
    tree=tree,
    defaults={
        **LLAMA_DEFAULTS,
        "sliding_window": 2047,
        "bskcn_1": [12, 20, 32, 44],
        "bskcn_2": [20, 32],
        "bskcn_3": [16, 24, 36, 48],
        "bskcn_4": [28, 40],
        "bskcn_tv": [0.9, 0.8],
        "eos_token_id": 2,
    },
)
