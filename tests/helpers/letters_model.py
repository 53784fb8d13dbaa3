"""A very small model with one token per letter: a configuration without weights, its tokenizer, a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from srv.errors import Refusal
from srv.planning.resolution import resolve_launch
from srv.testing.engine import user_input

CONTEXT = 100_000  # so that a request can run for many seconds
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONFIG: dict[str, Any] = {
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


HEAD_DIMS = (CONFIG["head_dim"], 64, 128, 32, 80, 256)


def write_model(folder: Path, head_dim: int = HEAD_DIMS[0]) -> Path:
    """Write all files except weights: start the model with `--load-format dummy`."""
    write_tokenizer(folder, ALPHABET)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "head_dim": head_dim}))
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    return folder


def write_accepted_model(folder: Path, device: str) -> Path:
    """The same with the first of `HEAD_DIMS` that the device's platform accepts. Raises its Refusal of the last one."""
    for head_dim in HEAD_DIMS:
        write_model(folder, head_dim)
        refusal = refusal_of("--device", device, "--model-path", str(folder), "--load-format", "dummy")
        if refusal is None:
            return folder
    raise refusal


def refusal_of(*arguments: str) -> Refusal | None:
    """Why `srv launch` would refuse these arguments, or None."""
    try:
        resolve_launch(user_input(arguments))
    except Refusal as refusal:
        return refusal
    return None


def write_tokenizer(folder: Path, alphabet: Sequence[str]) -> Path:
    """Write a tokenizer with one token per letter, or word, numbered in the order of `alphabet`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(alphabet)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
