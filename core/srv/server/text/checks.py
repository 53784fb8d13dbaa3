"""What a checkpoint's files ask of the tokenizer. Must not know requests."""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase

from srv.errors import ModelError
from srv.server.text.processor import TextProcessor
from srv.types import PooledHead


def check_case(head: PooledHead, text: TextProcessor) -> None:
    """Raises ModelError if the tokenizer does not lower the case of texts although the model was trained so."""
    if not head.lower_case or not text.has_tokenizer:
        return
    if text.encode(" ".join(ascii_uppercase)) != text.encode(" ".join(ascii_lowercase)):
        raise ModelError(
            "unsupported_config",
            "do_lower_case = true",
            "sentence_bert_config.json asks for texts in lower case, which the tokenizer does not make of them",
            "Add a Lowercase normalizer to tokenizer.json",
        )
