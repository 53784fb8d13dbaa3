"""The chat templates that come with a model, as texts by name ("default" if there is only one). Torch-free.

Owns which files they are read from, and which of these goes first. Must not know Jinja: a template is compiled by
`srv.server.text.chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srv.errors import ModelError
from srv.models.checkpoints.gguf_header import read_header

_KEY = "tokenizer.chat_template"  # of a GGUF file


def chat_templates(model: Path, tokenizer: Path | None = None, override: str | None = None) -> dict[str, str]:
    """The templates of a launch: of `override` (--chat-template), else of `tokenizer` (--tokenizer-path), else of the
    model.

    Raises ModelError with code not_found, bad_chat_template, damaged or truncated.
    """
    if override is not None:
        return read_override(override)
    return ({} if tokenizer is None else _read(tokenizer)) or _read(model)


def read_override(value: str) -> dict[str, str]:
    """Read the file of `--chat-template`: a Jinja file, or a JSON file with a field `chat_template`.

    Raises ModelError with code not_found or bad_chat_template.
    """
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"the file of --chat-template cannot be read ({error})"
        raise ModelError("not_found", value, reason, "Give the path of a Jinja file") from error
    if path.suffix != ".json":
        return {"default": text}
    try:
        return {"default": str(json.loads(text)["chat_template"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "the file of --chat-template is not a JSON object with a field chat_template"
        raise ModelError("bad_chat_template", value, reason, "Give a Jinja file instead") from error


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def templates_in_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates in the metadata of a GGUF file."""
    named = {name.removeprefix(f"{_KEY}."): text for name, text in metadata.items() if name.startswith(f"{_KEY}.")}
    default = {"default": metadata[_KEY]} if _KEY in metadata else {}
    return {name: text for name, text in (named | default).items() if isinstance(text, str)}


def read_text(path: Path) -> str:
    """The text of a file of a model. Raises ModelError damaged."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError("damaged", str(path), f"it cannot be read ({error})", "Download the file again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file does not exist. Raises ModelError damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError("damaged", str(path), f"it is not JSON ({error})", "Download the file again") from error
    if not isinstance(value, dict):
        raise ModelError("damaged", str(path), "it is not a JSON object", "Download the file again")
    return value


def _read(path: Path) -> dict[str, str]:
    """The templates of a folder, of the folder of a tokenizer.json, or of a GGUF file."""
    if path.is_dir():
        return _in_folder(path)
    if is_gguf(path):
        return templates_in_metadata(read_header(path, ()).metadata)
    return _in_folder(path.parent)


def _in_folder(folder: Path) -> dict[str, str]:
    """From tokenizer_config.json, overridden by chat_template.json, then by chat_template.jinja and
    additional_chat_templates/*.jinja, as transformers writes them."""
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {entry["name"]: entry["template"] for entry in value if {"name", "template"} <= set(entry)}
        elif isinstance(value, dict):
            templates |= value
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(path)
    return templates
