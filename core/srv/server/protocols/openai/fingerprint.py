"""`system_fingerprint` of OpenAI's responses: a digest of what determines outputs, the same at every start.

It covers the model's configuration, samples of its weight files, and the arguments that say how the model is computed.
Weights are not read as a whole, which would take as long as loading them. Must not know requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from srv import __version__
from srv.args.statement import Resolved
from srv.models.layers.rope_config import long_rope_length
from srv.quantization.registry import chosen
from srv.specs import ModelFacts

SAMPLES, SAMPLE_BYTES = 16, 4096  # of each weight file, evenly spaced
_WEIGHTS = frozenset({".gguf", ".safetensors"})


def system_fingerprint(model: ModelFacts, resolved: Resolved) -> str:
    """For example "fp_0f1e2d3c4b5a6978"."""
    digest = hashlib.blake2b(digest_size=8)
    config = resolved.config
    weights = config.weights
    method = chosen(model, weights.quantization, weights.torchao_config, dequantize=weights.dequantize_weights)
    facts = [
        __version__,
        model.architecture,
        model.quantization,
        dict(model.config),
        str(config.model.dtype),
        str(config.model.load_format),
        str(config.platform.kv_cache_dtype),
        weights.dequantize_weights,
        None if method is None else method.name,
        weights.custom_weight_loader,
        {slot: str(choice) for slot, choice in resolved.backends.items()},
    ]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    if weights.calculate_kv_scales:
        digest.update(b"calculate_kv_scales")
    original = long_rope_length(model.config, model.context_length)
    if original is not None and (config.model.context_length or model.context_length) <= original:
        digest.update(b"short factors of LongRoPE")
    if (scales := weights.quantization_param_path) is not None:
        digest.update(scales.expanduser().read_bytes())
    for sample in _samples(Path(model.path)):
        digest.update(sample)
    return f"fp_{digest.hexdigest()}"


def _samples(path: Path) -> Iterator[bytes]:
    """The name, the size and parts of each weight file."""
    files = sorted(entry for entry in path.iterdir() if entry.suffix in _WEIGHTS) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        yield f"{file.name}:{size}".encode()
        with file.open("rb") as content:
            for index in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                yield content.read(SAMPLE_BYTES)
