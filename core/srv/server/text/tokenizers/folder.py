"""Reads tokenizers from Hugging Face folders.

Owns the file names and their precedence. `tokenizer.json` needs only the `tokenizers` library; transformers is imported
only for a folder without one (a bare SentencePiece or tiktoken model).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from srv.errors import ModelError
from srv.models.chat_templates import read_json
from srv.models.remote_code import files_of, tokenizer_classes
from srv.server.text.tokenizers.codec import (
    METASPACE,
    ByteCodec,
    Codec,
    WindowCodec,
    byte_level_bytes,
    sentencepiece_bytes,
)
from srv.server.text.tokenizers.source import TOKEN_ROLES, TextSource

log = logging.getLogger(__name__)

OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
REMEDY = "Set --tokenizer-path to a folder that has one, a tokenizer.json or a GGUF file"


def read_folder(folder: Path, tokenizer_file: Path | None = None, remote_code: bool = False) -> TextSource:
    """Read the tokenizer of a folder; `tokenizer_file`: its tokenizer.json, if it has another name.

    `remote_code`: whether Python code of the folder may be run, for a tokenizer that only it implements.

    Raises ModelError with code no_tokenizer (its message lists the file names), damaged or remote_code.
    """
    config = read_json(folder / "tokenizer_config.json")
    path = tokenizer_file or folder / "tokenizer.json"
    if path.is_file():
        tokenizer = _load_tokenizer_json(path)
    elif any((folder / name).is_file() for name in OTHER_FILES) or list(folder.glob("*.tiktoken")):
        tokenizer = _load_with_transformers(folder, remote_code)
    else:
        reason = f"the folder has no tokenizer: neither tokenizer.json nor {', '.join(OTHER_FILES)} exists"
        raise ModelError("no_tokenizer", str(folder), reason, REMEDY)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    special_tokens = _special_tokens(folder, config)
    # Special tokens are those of the post-processor: as in transformers 5, add_bos_token and add_eos_token of
    # tokenizer_config.json do not replace that.
    return TextSource(tokenizer, _codec(tokenizer, size), size, None, special_tokens)


def _load_tokenizer_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = f"the tokenizers library cannot read it ({error})"
        raise ModelError("damaged", str(path), reason, "Download the file again") from error


def _load_with_transformers(folder: Path, remote_code: bool) -> Tokenizer:
    """transformers converts older formats to that of the `tokenizers` library where possible."""
    if remote_code and (classes := tokenizer_classes(folder)):
        log.warning("Python code of the tokenizer is run: %s in %s", files_of(classes), folder)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # the library raises bare Exception
        reason = f"it has no tokenizer.json, and transformers cannot convert its tokenizer ({error})"
        raise ModelError("no_tokenizer", str(folder), reason, REMEDY) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        reason = f"it has no tokenizer.json, and its {type(loaded).__name__} cannot be converted to one"
        raise ModelError("no_tokenizer", str(folder), reason, REMEDY)
    return backend


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; tokenizer_config.json takes precedence over special_tokens_map.json."""
    special_tokens: dict[str, str] = {}
    for entries in (read_json(folder / "special_tokens_map.json"), config):
        for role in TOKEN_ROLES:
            value = entries.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special_tokens[role] = text
    return special_tokens


def _codec(tokenizer: Tokenizer, vocab_size: int) -> Codec:
    """ByteCodec if the steps of the tokenizer's decoder are known to concatenate bytes, else WindowCodec."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(token for token, entry in added.items() if entry.special)
    steps = _decoder_steps(tokenizer)
    kinds = {str(step["type"]) for step in steps} - {"Fuse"}

    def bytes_by(convert: Callable[[str], bytes], verbatim: bool) -> Callable[[int], bytes]:
        def to_bytes(token: int) -> bytes:
            text = tokenizer.id_to_token(token)
            if text is None:
                return b""
            return text.encode() if verbatim and token in added else convert(text)

        return to_bytes

    if kinds == {"ByteLevel"}:
        return ByteCodec(bytes_by(byte_level_bytes, verbatim=True), vocab_size, special, strip_space=False)
    if kinds and all(_is_sentencepiece(step) for step in steps):
        strip = any(step["type"] == "Strip" or step.get("prepend_scheme", "never") != "never" for step in steps)
        convert = sentencepiece_bytes if "ByteFallback" in kinds else _metaspace_bytes
        return ByteCodec(bytes_by(convert, verbatim=False), vocab_size, special, strip_space=strip)
    return WindowCodec(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), vocab_size, special)


def _metaspace_bytes(token: str) -> bytes:
    return token.replace(METASPACE, " ").encode()


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_sentencepiece(step: Mapping[str, Any]) -> bool:
    """Whether `ByteCodec` does the same as this step: U+2581 to space, bytes, concatenation, stripping one space."""
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == METASPACE and content == " ")
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return bool((content, start, stop) == (" ", 1, 0))
        case {"type": "Metaspace", "replacement": replacement}:
            return bool(replacement == METASPACE)
        case {"type": "ByteFallback" | "Fuse"}:
            return True
    return False
