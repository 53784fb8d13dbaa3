"""The common result of reading any tokenizer file, from which the text processor is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from srv.server.text.processor import SpecialTokenAffixes
from srv.server.text.tokenizers.codec import Codec

# The special tokens that chat templates may use, by their names in tokenizer_config.json.
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextSource:
    """A tokenizer with its codec and special tokens.

    `affixes` None: the tokenizer's own post-processor adds special tokens. `special_tokens`: text by role
    ("bos_token" -> "<s>").
    """

    tokenizer: Tokenizer
    codec: Codec
    vocab_size: int
    affixes: SpecialTokenAffixes | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
