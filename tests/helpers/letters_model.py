"""A very small model with one token per letter: a configuration without weights, its tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

CONTEXT = 100_000  # so that a request can run for many seconds
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": len(ALPHABET),
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}


def write_model(folder: Path) -> Path:
    """Write all files except weights: start the model with `--load-format dummy`."""
    write_tokenizer(folder, ALPHABET)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    return folder


def write_tokenizer(folder: Path, alphabet: str) -> Path:
    """Write a tokenizer with one token per letter, numbered in the order of `alphabet`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(alphabet)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
