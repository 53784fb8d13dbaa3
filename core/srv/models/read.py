"""Model facts of whatever `locate` found: a GGUF file or a Hugging Face folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from srv.specs import ModelFacts


def read_facts(path: Path) -> ModelFacts:
    """Facts of the model at `path`, from headers alone: no weight is read and no torch imported.

    Raises ModelError with a stable code: not_found, truncated, damaged, unknown_architecture,
    unsupported_config, unsupported_format or unsupported_quantization.
    """
    if path.is_dir():  # the reader of one format costs nobody who has the other
        from srv.models.config.hf_config import read_folder

        return read_folder(path)
    from srv.models.config.gguf_config import read_gguf

    return read_gguf(path)
