"""A very small model with one token per byte, end tokens and dummy weights: its free output is noise.

What it generates under a grammar is therefore due to the grammar alone. `EXTRA` are tokens of several bytes, and the
logits are wider than the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from letters_model import CONFIG
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from srv.server.text.tokenizers.codec import BYTE_OF_CHARACTER

EXTRA = ('{"', '":', '"}', "true", "false", "12", "ab", "é")
END, OTHER_END = "<end>", "<turn>"
CONTEXT = 4096


def write_model(folder: Path, vocab_size: int = 320, **fields: Any) -> Path:
    """Write all files except weights: start the model with `--load-format dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    tokens = [characters[byte] for byte in range(256)]
    tokens += ["".join(characters[byte] for byte in text.encode()) for text in EXTRA]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, OTHER_END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in (END, OTHER_END)]
    config = {**CONFIG, "vocab_size": vocab_size, "max_position_embeddings": CONTEXT, "eos_token_id": ends, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    return folder
