"""Read the facts of a model that `locate` has found: a GGUF file or a Hugging Face folder. Torch-free."""

from __future__ import annotations

from pathlib import Path

from srv.models.options import DEFAULT_OPTIONS, ReadOptions
from srv.specs import ModelFacts


def read_facts(path: Path, options: ReadOptions = DEFAULT_OPTIONS) -> ModelFacts:
    """The facts of the model at `path`, only from headers: no weights are read, and torch is not imported.

    Raises ModelError with a stable code: not_found, truncated, damaged, unknown_architecture, unknown_override,
    unsupported_config, unsupported_format or unsupported_quantization. PluginError for a faulty package of another
    distribution.
    """
    if path.is_dir():  # import only the reader of this format
        from srv.models.config.hf_config import read_folder

        return read_folder(path, options)
    from srv.models.config.gguf_config import read_gguf

    return read_gguf(path, options)
