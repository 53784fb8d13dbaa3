"""What every kind of model file yields: the values from which the text processor is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from srv.server.text.tokenizers.codec import Codec

# The roles of special tokens that chat templates may name, as tokenizer_config.json spells them.
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Frame:
    """Ids put around a text that is encoded with special tokens."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextSource:
    """A tokenizer ready for use, and what its files say besides.

    `frame` None: the tokenizer's own post-processor adds special tokens. `roles`: special tokens by role
    ("bos_token" -> "<s>"). `templates`: chat templates by name ("default" for the only one).
    """

    tokenizer: Tokenizer
    codec: Codec
    vocab_size: int
    frame: Frame | None
    roles: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)
