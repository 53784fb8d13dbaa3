"""What is known of a model before its weights are read: from `config.json` or the GGUF header.

Torch-free, so that `srv plan` answers on a laptop in a moment. `read` modules fill these values; nobody
changes them afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one page table: their kind of state and its size per token.

    kind: "full" (every earlier token) or "window" (the last `window` tokens); later kinds are "latent"
    and "recurrent". The first release serves models of exactly one "full" group; a sliding-window model
    is one "full" group whose layers mask by window.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model.

    `format`: "gguf", "safetensors" or "config" (a config without weights, for `--load-format dummy`).
    `path`: the file or folder, absolute. `architecture`: the Hugging Face class name, e.g.
    "LlamaForCausalLM". `config`: the fields of the Hugging Face configuration, GGUF names translated.
    `dtype`: the checkpoint's own torch dtype name (for a quantised GGUF file: "float16", the type its
    scales are stored in). `quantization`: None, or the scheme's name ("gguf:Q4_1").
    `context_length` in tokens; `parameters` counted; `weight_bytes` on disk; `in_blocks`: parameters in blocks of a
    GGUF file that some platforms multiply as they are (`srv.models.gguf_types.BLOCKS`); `in_integers`: parameters of
    a safetensors checkpoint that are stored as int8.
    `end_tokens`: the ids that end a generation; `bos_token` the id that begins a text, if any.
    """

    name: str
    path: str
    format: str
    architecture: str
    config: Mapping[str, Any]
    dtype: str
    quantization: str | None
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    parameters: int
    weight_bytes: int
    cache_groups: tuple[CacheGroup, ...]
    end_tokens: tuple[int, ...] = ()
    bos_token: int | None = None
    files: tuple[str, ...] = field(default=())
    in_blocks: int = 0
    in_integers: int = 0
