"""What a process that encodes texts gets and returns."""

from __future__ import annotations

import msgspec

CODE = "run-code"  # the argument with which Python code of the tokenizer's folder may be run


class Texts(msgspec.Struct, array_like=True):
    """Texts to encode, which are valid Unicode."""

    texts: list[str]
    special: bool


class Ids(msgspec.Struct, array_like=True):
    """For each text, its token ids as the bytes of C integers."""

    ids: list[bytes]
