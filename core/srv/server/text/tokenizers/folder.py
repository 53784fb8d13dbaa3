"""Tokenizers from Hugging Face folders.

Owns the files' names and which one wins. `tokenizer.json` is read by the `tokenizers` library alone; only a
folder without one (a bare SentencePiece or tiktoken model) is given to transformers, imported on that path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from srv.errors import ModelError
from srv.server.text.tokenizers.codec import (
    WORD_BORDER,
    ByteCodec,
    Codec,
    WindowCodec,
    byte_level_bytes,
    sentencepiece_bytes,
)
from srv.server.text.tokenizers.source import TOKEN_ROLES, Frame, TextSource

OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
GIVE = "Give a folder that has them, or a tokenizer.json or GGUF file, with --tokenizer-path"


def read_folder(folder: Path, tokenizer_file: Path | None = None) -> TextSource:
    """The tokenizer and chat templates of a folder; `tokenizer_file` if its tokenizer.json has another name.

    Raises ModelError with code no_tokenizer (names the files looked for) or damaged.
    """
    config = _json(folder / "tokenizer_config.json")
    path = tokenizer_file or folder / "tokenizer.json"
    if path.is_file():
        tokenizer = _load(path)
    elif any((folder / name).is_file() for name in OTHER_FILES) or list(folder.glob("*.tiktoken")):
        tokenizer = _load_by_transformers(folder)
    else:
        reason = f"the folder has no tokenizer: neither tokenizer.json nor {', '.join(OTHER_FILES)} is there"
        raise ModelError("no_tokenizer", str(folder), reason, GIVE)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    roles = _roles(folder, config)
    frame = _frame(tokenizer, config, roles)
    return TextSource(tokenizer, _codec(tokenizer, size), size, frame, roles, read_folder_templates(folder))


def read_folder_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a folder by name: tokenizer_config.json, overridden by chat_template.json, then
    by chat_template.jinja and additional_chat_templates/*.jinja, as transformers writes them."""
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        stated = _json(folder / name).get("chat_template")
        if isinstance(stated, str):
            templates["default"] = stated
        elif isinstance(stated, list):
            templates |= {entry["name"]: entry["template"] for entry in stated if {"name", "template"} <= set(entry)}
        elif isinstance(stated, dict):
            templates |= stated
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _text(path)
    return templates


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError("damaged", str(path), f"it cannot be read ({error})", "Fetch the file again") from error


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ModelError("damaged", str(path), f"it is not JSON ({error})", "Fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError("damaged", str(path), "it is no JSON object", "Fetch the file again")
    return value


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = f"it is no tokenizer that the tokenizers library reads ({error})"
        raise ModelError("damaged", str(path), reason, "Fetch the file again") from error


def _load_by_transformers(folder: Path) -> Tokenizer:
    """transformers converts the older formats to the `tokenizers` library's where that is possible."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library raises bare Exception
        reason = f"it has no tokenizer.json, and transformers cannot convert what is there ({error})"
        raise ModelError("no_tokenizer", str(folder), reason, GIVE) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        reason = f"it has no tokenizer.json, and its {type(loaded).__name__} has no equivalent of one"
        raise ModelError("no_tokenizer", str(folder), reason, GIVE)
    return backend


def _roles(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; tokenizer_config.json wins over special_tokens_map.json."""
    roles: dict[str, str] = {}
    for stated in (_json(folder / "special_tokens_map.json"), config):
        for role in TOKEN_ROLES:
            value = stated.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                roles[role] = text
    return roles


def _frame(tokenizer: Tokenizer, config: Mapping[str, Any], roles: Mapping[str, str]) -> Frame | None:
    """tokenizer_config.json's add_bos_token and add_eos_token, where stated, replace the post-processor
    of tokenizer.json (transformers 5 does the same)."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return None
    ids = [
        (tokenizer.token_to_id(roles[role]),) if config.get(f"add_{role}") and role in roles else ()
        for role in ("bos_token", "eos_token")
    ]
    before, after = (tuple(token for token in part if token is not None) for part in ids)
    return Frame(before, after)


def _codec(tokenizer: Tokenizer, vocab_size: int) -> Codec:
    """By the steps of the tokenizer's decoder: bytes where they are known to concatenate, else a window."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(token for token, entry in added.items() if entry.special)
    steps = _decoder_steps(tokenizer)
    kinds = {str(step["type"]) for step in steps} - {"Fuse"}

    def spelled_by(spelling: Callable[[str], bytes], verbatim: bool) -> Callable[[int], bytes]:
        def spell(token: int) -> bytes:
            text = tokenizer.id_to_token(token)
            if text is None:
                return b""
            return text.encode() if verbatim and token in added else spelling(text)

        return spell

    if kinds == {"ByteLevel"}:
        return ByteCodec(spelled_by(byte_level_bytes, verbatim=True), vocab_size, special, strip_space=False)
    if kinds and all(_is_sentencepiece(step) for step in steps):
        strip = any(step["type"] == "Strip" or step.get("prepend_scheme", "never") != "never" for step in steps)
        spelling = sentencepiece_bytes if "ByteFallback" in kinds else _border_bytes
        return ByteCodec(spelled_by(spelling, verbatim=False), vocab_size, special, strip_space=strip)
    return WindowCodec(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), vocab_size, special)


def _border_bytes(token: str) -> bytes:
    return token.replace(WORD_BORDER, " ").encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece(step: Mapping[str, Any]) -> bool:
    """Is this a step whose effect `ByteCodec` has: borders to spaces, bytes, joining, one space stripped?"""
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == WORD_BORDER and content == " ")
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return bool((content, start, stop) == (" ", 1, 0))
        case {"type": "Metaspace", "replacement": replacement}:
            return bool(replacement == WORD_BORDER)
        case {"type": "ByteFallback" | "Fuse"}:
            return True
    return False
